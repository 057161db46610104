"""Tree masks and the attention backends that read keys and values from cache blocks."""
