"""Which drafter reads which passages.

A partition is a tuple of subsets; a subset is a tuple of passage indices (rank order, from 0).
Every passage lies in exactly one subset and no subset is empty, so there may be fewer subsets than
asked for.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

Partition = tuple[tuple[int, ...], ...]
"""Subsets of passage indices, each ascending."""


class PartitionStrategy(StrEnum):
    """How passages are shared out among drafters."""

    RANKED = "ranked"
    CONTIGUOUS = "contiguous"
    DIVERSE = "diverse"


class Partitioner(Protocol):
    """Shares passages out; a strategy that needs embeddings is built around them."""

    def __call__(self, num_passages: int, num_subsets: int) -> Partition:
        """Return at most ``num_subsets`` subsets that cover all passages.

        Raises:
            ValueError: ``num_passages`` < 0 or ``num_subsets`` < 1.
        """
        ...


def partition_ranked(num_passages: int, num_subsets: int) -> Partition:
    """Deal passages round robin by rank, so that every subset gets its share of the best ones.

    Implements :class:`Partitioner`.
    """
    num_subsets = _check_counts(num_passages, num_subsets)
    return tuple(tuple(range(idx, num_passages, num_subsets)) for idx in range(num_subsets))


def partition_contiguous(num_passages: int, num_subsets: int) -> Partition:
    """Cut the ranking into runs whose lengths differ by at most one, longer runs first.

    Implements :class:`Partitioner`.
    """
    num_subsets = _check_counts(num_passages, num_subsets)
    if not num_subsets:
        return ()
    share, extra = divmod(num_passages, num_subsets)
    starts = [idx * share + min(idx, extra) for idx in range(num_subsets + 1)]
    return tuple(tuple(range(starts[idx], starts[idx + 1])) for idx in range(num_subsets))


def _check_counts(num_passages: int, num_subsets: int) -> int:
    """Validate the counts and return how many subsets are possible."""
    if num_passages < 0:
        raise ValueError(f"num_passages={num_passages} must be at least 0")
    if num_subsets < 1:
        raise ValueError(f"num_subsets={num_subsets} must be at least 1")
    return min(num_passages, num_subsets)
