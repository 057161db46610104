"""From logits to the law a token is drawn from, and the draw."""
