"""Tiles show every query exactly the keys its segment's mask shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.attention.masks import compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import Segment, TreePart
from specrag_inference.attention.tiles import cut_tiles

PARENTS = (-1, -1, 0, 0, 2, 1, 4, 4)


def build_segment(num_cached: int, num_chain: int, num_nodes: int) -> Segment:
    tree = None
    if num_nodes:
        mask = compute_ancestor_mask(np.array(PARENTS[:num_nodes], dtype=np.int32))
        tree = TreePart(depths=compute_depths(mask), rows=mask)
    runs = ((0, num_cached + num_chain + num_nodes),)
    return Segment(num_cached=num_cached, num_chain=num_chain, tree=tree, slot_runs=runs)


@given(
    num_cached=st.integers(0, 30),
    num_chain=st.integers(1, 12),
    num_nodes=st.integers(0, len(PARENTS)),
    window=st.one_of(st.none(), st.integers(1, 50)),
    max_queries=st.integers(1, 30),
)
def test_tiles_rebuild_the_mask_of_their_segment(
    num_cached: int, num_chain: int, num_nodes: int, window: int | None, max_queries: int
) -> None:
    segment = build_segment(num_cached, num_chain, num_nodes)
    rebuilt = np.zeros((segment.num_queries, segment.num_keys), dtype=np.bool_)
    next_query = 0
    for tile in cut_tiles(segment, window=window, max_queries=max_queries):
        assert tile.first_query == next_query
        assert tile.num_queries <= max_queries
        next_query += tile.num_queries
        rows = rebuilt[tile.first_query : next_query]
        rows[:, tile.first_key : tile.end_key] = True
        if tile.penalties is not None:
            rows[:, tile.masked_from : tile.end_key] = tile.penalties == 0
    assert next_query == segment.num_queries
    assert np.array_equal(rebuilt, segment.compute_mask(window))


def test_tiles_of_a_chain_read_no_key_behind_their_last_query() -> None:
    tiles = cut_tiles(build_segment(5, 12, 0), window=None, max_queries=4)
    assert [(tile.masked_from, tile.end_key) for tile in tiles] == [(6, 9), (10, 13), (14, 17)]


@pytest.mark.parametrize("num_cached", [0, 9])
def test_a_single_token_needs_no_mask(num_cached: int) -> None:
    (tile,) = cut_tiles(build_segment(num_cached, 1, 0), window=None, max_queries=4)
    assert tile.penalties is None
    assert (tile.first_key, tile.end_key) == (0, num_cached + 1)
