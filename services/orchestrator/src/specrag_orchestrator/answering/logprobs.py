"""Log-probabilities of committed tokens, as the caller sees them: with each token's text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.wire.verified import TopTokens

from specrag_orchestrator.answering.events import TokenLogprob, TokenLogprobs, TopLogprob

if TYPE_CHECKING:
    from specrag_common.wire.verified import VerifiedTokens
    from tokenizers import Tokenizer

_NONE = TopTokens(token_ids=(), logprobs=())


def describe_logprobs(
    verified: VerifiedTokens, tokenizer: Tokenizer, *, first_token: int
) -> TokenLogprobs:
    """Return the event for tokens that the target committed at once.

    Args:
        verified: the tokens.
        tokenizer: the target's; each token is shown alone, special ones by their name.
        first_token: answer tokens committed before.
    """
    tops = verified.top_tokens or (_NONE,) * len(verified.token_ids)
    return TokenLogprobs(
        first_token=first_token,
        tokens=tuple(
            TokenLogprob(
                token_id=token_id,
                text=_show(tokenizer, token_id),
                logprob=logprob,
                top=tuple(
                    TopLogprob(token_id=one, text=_show(tokenizer, one), logprob=its_logprob)
                    for one, its_logprob in zip(top.token_ids, top.logprobs, strict=True)
                ),
            )
            for token_id, logprob, top in zip(
                verified.token_ids, verified.logprobs, tops, strict=True
            )
        ),
    )


def _show(tokenizer: Tokenizer, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], skip_special_tokens=False)
    return text
