"""Tree masks against the definition, written with loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.token_tree import ROOT
from specrag_inference.attention.masks import (
    check_parents,
    compute_ancestor_mask,
    compute_depths,
    compute_visibility,
)
from specrag_inference.attention.step import Segment, TreePart


@st.composite
def parent_arrays(
    draw: st.DrawFn, max_nodes: int = 24
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    num_nodes = draw(st.integers(0, max_nodes))
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(num_nodes)]
    return np.array(parents, dtype=np.int32)


def list_ancestors(parent_idx: np.ndarray[tuple[int], np.dtype[np.int32]], node: int) -> set[int]:
    found = set()
    while node != ROOT:
        found.add(node)
        node = int(parent_idx[node])
    return found


@given(parent_idx=parent_arrays())
def test_ancestor_mask_and_depths_equal_the_walk_to_the_root(
    parent_idx: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> None:
    mask = compute_ancestor_mask(parent_idx)
    depths = compute_depths(mask)
    for node in range(len(parent_idx)):
        ancestors = list_ancestors(parent_idx, node)
        assert set(np.flatnonzero(mask[node]).tolist()) == ancestors
        assert depths[node] == len(ancestors)


def test_linear_tree_equals_a_causal_chain() -> None:
    chain = np.arange(-1, 40, dtype=np.int32)
    assert (compute_ancestor_mask(chain) == np.tri(41, dtype=np.bool_)).all()


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1, 5]])
def test_parents_that_do_not_come_before_their_children_are_refused(parents: list[int]) -> None:
    with pytest.raises(ValueError, match="parent_idx"):
        check_parents(np.array(parents, dtype=np.int32))


def test_every_query_sees_the_cache_and_nodes_see_the_whole_chain() -> None:
    rows = compute_ancestor_mask(np.array([-1, -1, 0], dtype=np.int32))
    visible = compute_visibility(num_cached=2, num_chain=2, tree_rows=rows)
    expected = [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 1, 0, 1],
    ]
    assert visible.astype(int).tolist() == expected


@given(parent_idx=parent_arrays(), num_cached=st.integers(0, 9), window=st.integers(1, 12))
def test_window_hides_what_is_too_far_back_by_position_not_by_slot(
    parent_idx: np.ndarray[tuple[int], np.dtype[np.int32]], num_cached: int, window: int
) -> None:
    rows = compute_ancestor_mask(parent_idx)
    tree = TreePart(depths=compute_depths(rows), rows=rows)
    segment = Segment(num_cached=num_cached, num_chain=1, tree=tree, slot_runs=())
    mask = segment.compute_mask(window)
    for node, depth in enumerate(tree.depths.tolist()):
        position = num_cached + depth
        expected = {key for key in range(num_cached + 1) if position - key < window}
        expected |= {
            num_cached + 1 + other
            for other in list_ancestors(parent_idx, node)
            if depth - tree.depths[other] < window
        }
        assert set(np.flatnonzero(mask[1 + node]).tolist()) == expected


def test_only_segments_whose_queries_see_every_key_go_without_a_mask() -> None:
    alone = TreePart(depths=np.array([1, 2], dtype=np.int32), rows=np.array([[True, True]]))
    aside = TreePart(depths=np.array([1, 1], dtype=np.int32), rows=np.array([[False, True]]))
    decode = Segment(num_cached=5, num_chain=1, tree=None, slot_runs=())
    assert decode.sees_everything
    assert Segment(num_cached=5, num_chain=0, tree=alone, slot_runs=()).sees_everything
    assert not Segment(num_cached=5, num_chain=0, tree=aside, slot_runs=()).sees_everything
    assert not Segment(num_cached=0, num_chain=2, tree=None, slot_runs=()).sees_everything
