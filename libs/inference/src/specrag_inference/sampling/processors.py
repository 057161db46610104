"""Logits to the law of one token: a chain of small processors, then softmax.

The target's processed law is what speculation must reproduce; the drafter may process as it likes.
Each processor maps logits to logits, ``-inf`` where a token is ruled out. A history-dependent one
(penalties) reads the tokens on the way to the node from :class:`TokenHistory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from specrag_inference.sampling.numerics import check_finite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from specrag_inference.messages import SamplingParams

Floats = TypeVar("Floats", np.float32, np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens before the one whose law is made.

    Attributes:
        prompt_token_ids: the prompt.
        answer_token_ids: committed answer tokens, then the tree path down to the node.
    """

    prompt_token_ids: Sequence[int] = ()
    answer_token_ids: Sequence[int] = ()


NO_HISTORY = TokenHistory()


class LogitsProcessor(Protocol):
    """One step of the chain. Pure: the same logits and history give the same result."""

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:
        """Return processed logits: [vocab_size], dtype kept, input left alone."""
        ...


@dataclass(frozen=True, slots=True)
class Temperature:
    """Divide by a positive temperature."""

    temperature: float

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:  # noqa: ARG002 - part of the seam
        """Return logits / temperature, shifted so that the largest stays 0 however small it is."""
        divisor = max(logits.dtype.type(self.temperature), np.finfo(logits.dtype).tiny)
        with np.errstate(over="ignore"):
            scaled: NDArray[Floats] = (logits - logits.max()) / divisor
        return scaled


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the ``top_k`` largest logits, the lowest ids on ties."""

    top_k: int

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:  # noqa: ARG002 - part of the seam
        """Return logits with all others ruled out."""
        if self.top_k >= len(logits):
            return logits
        return _keep_only(logits, select_top(logits, self.top_k))


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the smallest set of most likely tokens that holds ``top_p`` of the mass."""

    top_p: float

    def __call__(self, logits: NDArray[Floats], history: TokenHistory) -> NDArray[Floats]:  # noqa: ARG002 - part of the seam
        """Return logits with all others ruled out; at least one token is kept."""
        probs = softmax(logits)
        # What lies below this bound has less than 1 - top_p of the mass together.
        bound = probs.dtype.type(0.5 * (1.0 - self.top_p) / len(probs))
        descending = np.sort(probs[probs >= bound])[::-1]
        cumulative = np.cumsum(descending, dtype=np.float64)
        num_kept = min(int(np.searchsorted(cumulative, self.top_p)) + 1, len(descending))
        return _keep_only(logits, _select_from(probs, descending[num_kept - 1], num_kept))


def build_processors(params: SamplingParams) -> tuple[LogitsProcessor, ...]:
    """Return the chain for a temperature above 0: temperature, then top-k, then top-p."""
    chain: list[LogitsProcessor] = [Temperature(params.temperature)]
    if params.top_k:
        chain.append(TopK(params.top_k))
    if params.top_p < 1.0:
        chain.append(TopP(params.top_p))
    return tuple(chain)


def compute_law(
    logits: NDArray[Floats], params: SamplingParams, history: TokenHistory = NO_HISTORY
) -> NDArray[Floats]:
    """Return the law of the next token after all processors.

    Args:
        logits: [vocab_size] float32 or float64, finite. Padding ids are cut off by the caller.
        params: temperature, top-k and top-p.
        history: for history-dependent processors.

    Returns:
        [vocab_size], dtype of ``logits``, sums to 1. At temperature 0 one-hot at the argmax, the
        lowest id on ties.

    Raises:
        NumericsError: a logit is NaN or infinite.
    """
    check_finite(logits, "logits")
    if params.temperature == 0.0:
        law = np.zeros_like(logits)
        law[int(np.argmax(logits))] = 1.0
        return law
    processed = logits
    for processor in build_processors(params):
        processed = processor(processed, history)
    return softmax(processed)


def softmax(logits: NDArray[Floats]) -> NDArray[Floats]:
    """Return exp(logits) normalised; the sum is taken in float64."""
    weights = np.exp(logits - logits.max())
    law: NDArray[Floats] = weights / weights.dtype.type(weights.sum(dtype=np.float64))
    return law


def select_top(values: NDArray[Floats], count: int) -> NDArray[np.intp]:
    """Return the indices of the ``count`` largest values, ascending; lowest index on ties."""
    if count >= len(values):
        return np.arange(len(values))
    threshold = np.partition(values, len(values) - count)[len(values) - count]
    return _select_from(values, threshold, count)


def _select_from(
    values: NDArray[Floats], threshold: np.floating[Any], count: int
) -> NDArray[np.intp]:
    """Return the indices above ``threshold``, and of the lowest ties with it up to ``count``."""
    selected = np.flatnonzero(values >= threshold)
    num_surplus = len(selected) - count
    if num_surplus > 0:
        ties = np.flatnonzero(values[selected] == threshold)
        selected = np.delete(selected, ties[-num_surplus:])
    return selected


def _keep_only(logits: NDArray[Floats], token_ids: NDArray[np.intp]) -> NDArray[Floats]:
    """Return logits with ``-inf`` everywhere but at ``token_ids``."""
    kept = np.full_like(logits, -np.inf)
    kept[token_ids] = logits[token_ids]
    return kept
