"""The most likely tokens of a law, with their log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specrag_inference.messages import TokenLogprob
from specrag_inference.sampling.truncation import select_top

if TYPE_CHECKING:
    from numpy.typing import NDArray


def list_top_tokens(law: NDArray[np.floating[Any]], count: int) -> tuple[TokenLogprob, ...]:
    """Return up to ``count`` tokens, the most likely first, the lowest id on ties.

    Args:
        law: [vocab_size], sums to 1.
        count: fewer are returned where the law holds fewer.
    """
    if count == 0:
        return ()
    token_ids = select_top(law, count)
    token_ids = token_ids[law[token_ids] > 0]
    token_ids = token_ids[np.argsort(-law[token_ids], kind="stable")]
    return tuple(
        TokenLogprob(token_id=int(token_id), logprob=compute_logprob(law[token_id]))
        for token_id in token_ids
    )


def compute_logprob(probability: np.floating[Any]) -> float:
    """Return the natural log; the smallest float's where rounding left an accepted token none."""
    return float(np.log(max(float(probability), float(np.finfo(np.float64).tiny))))
