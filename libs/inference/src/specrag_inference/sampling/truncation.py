"""Which tokens may be drawn at all: temperature scaling, then min-p, top-k and top-p.

Works on :class:`Candidates`, so that each step touches only what the one before it left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Floats = TypeVar("Floats", np.float32, np.float64)

_FIRST_BOUND = 1e-3
_BOUND_STEP = 0.1


@dataclass(frozen=True, slots=True)
class Candidates(Generic[Floats]):
    """The tokens left, with their scaled logits.

    Attributes:
        logits: [num_candidates], at most 0; the most likely token's is 0.
        token_ids: [num_candidates] ascending; ``None`` = all of the vocabulary.
    """

    logits: NDArray[Floats]
    token_ids: NDArray[np.intp] | None = None

    def take(self, idx: NDArray[np.intp]) -> Candidates[Floats]:
        """Return the candidates at ``idx``, ascending."""
        token_ids = idx if self.token_ids is None else self.token_ids[idx]
        return Candidates(self.logits[idx], token_ids)

    def compute_law(self, vocab_size: int) -> NDArray[Floats]:
        """Return exp(logits) normalised, 0 for every other token; the sum is taken in float64.

        Returns:
            [vocab_size], dtype of the logits.
        """
        weights = np.exp(self.logits)
        weights /= weights.dtype.type(weights.sum(dtype=np.float64))
        if self.token_ids is None:
            return weights
        law = np.zeros(vocab_size, dtype=weights.dtype)
        law[self.token_ids] = weights
        return law


class Truncation(Protocol):
    """One step that rules tokens out: whatever it keeps, it keeps all likelier tokens too."""

    def __call__(self, candidates: Candidates[Floats]) -> Candidates[Floats]:
        """Return the candidates that remain; at least the most likely one."""
        ...


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the ``top_k`` largest logits, the lowest ids on ties."""

    top_k: int

    def __call__(self, candidates: Candidates[Floats]) -> Candidates[Floats]:
        """See :class:`Truncation`."""
        if self.top_k >= len(candidates.logits):
            return candidates
        return candidates.take(select_top(candidates.logits, self.top_k))


@dataclass(frozen=True, slots=True)
class MinP:
    """Keep tokens at least ``min_p`` times as likely as the most likely one."""

    min_p: float

    def __call__(self, candidates: Candidates[Floats]) -> Candidates[Floats]:
        """See :class:`Truncation`."""
        return candidates.take(np.flatnonzero(candidates.logits >= math.log(self.min_p)))


@dataclass(frozen=True, slots=True)
class TopP:
    """Keep the smallest set of most likely tokens that holds ``top_p`` of what is left."""

    top_p: float

    def __call__(self, candidates: Candidates[Floats]) -> Candidates[Floats]:
        """See :class:`Truncation`."""
        weights = np.exp(candidates.logits)
        wanted = self.top_p * float(weights.sum(dtype=np.float64))
        head = _find_head(weights, wanted)
        values = weights[head]
        descending = np.sort(values)[::-1]
        cumulative = np.cumsum(descending, dtype=np.float64)
        num_kept = min(int(np.searchsorted(cumulative, wanted)) + 1, len(head))
        return candidates.take(head[_select_from(values, descending[num_kept - 1], num_kept)])


def _find_head(weights: NDArray[Floats], wanted: float) -> NDArray[np.intp]:
    """Return the indices of the likeliest tokens, enough to weigh ``wanted`` together.

    What is left out needs no sorting. The bound falls until enough lies above it: all tokens weigh
    enough, but for rounding.
    """
    bound = _FIRST_BOUND
    while bound > np.finfo(weights.dtype).tiny:
        head = np.flatnonzero(weights >= bound)
        if float(weights[head].sum(dtype=np.float64)) >= wanted:
            return head
        bound *= _BOUND_STEP
    return np.arange(len(weights))


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
