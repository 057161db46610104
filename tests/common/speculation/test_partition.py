"""Partitions cover everything once and leave no subset empty."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.partition import (
    Partitioner,
    partition_contiguous,
    partition_ranked,
)

PARTITIONERS: list[Partitioner] = [partition_ranked, partition_contiguous]


def test_ranked_deals_round_robin() -> None:
    assert partition_ranked(7, 3) == ((0, 3, 6), (1, 4), (2, 5))


def test_contiguous_cuts_even_runs() -> None:
    assert partition_contiguous(7, 3) == ((0, 1, 2), (3, 4), (5, 6))


@given(
    partitioner=st.sampled_from(PARTITIONERS),
    num_passages=st.integers(0, 60),
    num_subsets=st.integers(1, 20),
)
def test_every_passage_is_in_one_subset_and_sizes_are_even(
    partitioner: Partitioner, num_passages: int, num_subsets: int
) -> None:
    subsets = partitioner(num_passages, num_subsets)
    assert sorted(idx for subset in subsets for idx in subset) == list(range(num_passages))
    assert len(subsets) == min(num_passages, num_subsets)
    sizes = [len(subset) for subset in subsets]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert all(list(subset) == sorted(subset) for subset in subsets)


@pytest.mark.parametrize("partitioner", PARTITIONERS)
@pytest.mark.parametrize(("num_passages", "num_subsets"), [(-1, 2), (3, 0), (3, -1)])
def test_absurd_counts_are_refused(
    partitioner: Partitioner, num_passages: int, num_subsets: int
) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        partitioner(num_passages, num_subsets)
