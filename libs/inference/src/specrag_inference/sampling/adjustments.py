"""What changes logits before the temperature, and so may change the argmax."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from specrag_inference.sampling.history import TokenHistory
    from specrag_inference.sampling.truncation import Floats


class LogitBias:
    """Adds a constant to the logits of some tokens."""

    __slots__ = ("_biases", "_token_ids")

    def __init__(self, logit_bias: Sequence[tuple[int, float]]) -> None:
        """Take (token id, bias) pairs with distinct ids."""
        self._token_ids = np.array([token_id for token_id, _ in logit_bias], dtype=np.int64)
        self._biases = np.array([bias for _, bias in logit_bias], dtype=np.float64)

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:  # noqa: ARG002 - part of the seam
        """See :class:`~specrag_inference.sampling.processors.LogitsProcessor`."""
        biased = logits.copy()
        biased[self._token_ids] += self._biases.astype(logits.dtype)
        return biased


class MinTokens:
    """Rules out the tokens that would end the answer while it is shorter than ``min_tokens``."""

    __slots__ = ("_min_tokens", "_stop_token_ids")

    def __init__(self, min_tokens: int, stop_token_ids: Iterable[int]) -> None:
        """Hold back ``stop_token_ids``; ids beyond the vocabulary do not matter."""
        self._min_tokens = min_tokens
        self._stop_token_ids = np.array(sorted(stop_token_ids), dtype=np.int64)

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """See :class:`~specrag_inference.sampling.processors.LogitsProcessor`."""
        if history.num_answer_tokens >= self._min_tokens:
            return logits
        held = logits.copy()
        held[self._stop_token_ids[self._stop_token_ids < len(logits)]] = -np.inf
        return held


class Penalties:
    """Makes tokens that came before less likely (or more, below the neutral values).

    Repetition looks at prompt and answer: a positive logit is divided by the penalty, a negative
    one multiplied. Frequency and presence look at the answer: the one is subtracted for every time
    a token came, the other once. Counts are put together first and applied once, so that a token on
    the path and the same token committed give the same bits.
    """

    __slots__ = ("_frequency", "_presence", "_repetition")

    def __init__(self, *, repetition: float, frequency: float, presence: float) -> None:
        """Set the penalties; 1, 0 and 0 are neutral."""
        self._repetition = repetition
        self._frequency = frequency
        self._presence = presence

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """See :class:`~specrag_inference.sampling.processors.LogitsProcessor`."""
        penalised = logits.copy()
        if self._repetition != 1.0:
            token_ids = history.count_all().token_ids
            values, factor = penalised[token_ids], logits.dtype.type(self._repetition)
            with np.errstate(over="ignore"):  # an infinity is found at the end of the chain
                penalised[token_ids] = np.where(values > 0, values / factor, values * factor)
        if self._frequency or self._presence:
            token_ids, counts = history.count_answer()
            penalty = self._frequency * counts + self._presence
            penalised[token_ids] -= penalty.astype(logits.dtype)
        return penalised
