"""The tree's own geometry and its integrity check."""

from __future__ import annotations

import numpy as np
import pytest
from specrag_common.speculation.proposals import SiblingKind
from specrag_common.speculation.token_tree import ROOT, NodeProposal, TokenTree


def build(token_ids: list[int], parent_idx: list[int], *proposed: int) -> TokenTree:
    return TokenTree(
        token_ids=np.array(token_ids, dtype=np.int32),
        parent_idx=np.array(parent_idx, dtype=np.int32),
        proposals=tuple(
            NodeProposal(
                node_idx=node_idx,
                drafter_index=0,
                branch_idx=idx,
                law=None,
                sibling_kind=SiblingKind.IID,
            )
            for idx, node_idx in enumerate(proposed)
        ),
    )


TREE = build([5, 6, 5, 7], [ROOT, 0, 1, ROOT], 0, 1, 2, 3)


def test_levels_children_and_paths_follow_the_parents() -> None:
    assert TREE.compute_levels().tolist() == [0, 1, 2, 0]
    assert TREE.compute_children() == {ROOT: (0, 3), 0: (1,), 1: (2,)}
    assert TREE.compute_path(2) == (0, 1, 2)
    assert TREE.compute_path(ROOT) == ()


def test_empty_tree_is_sound() -> None:
    tree = TokenTree.empty()
    tree.check_integrity()
    assert tree.num_nodes == tree.num_draft_tokens == len(tree.compute_levels()) == 0
    assert tree.compute_children() == {ROOT: ()}


def test_permuted_tree_is_the_same_tree() -> None:
    tree = TREE.permuted([3, 0, 1, 2])
    assert tree.token_ids.tolist() == [7, 5, 6, 5]
    assert tree.parent_idx.tolist() == [ROOT, ROOT, 1, 2]
    assert [proposal.node_idx for proposal in tree.proposals] == [1, 2, 3, 0]


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 1, 2], [1, 0, 2, 3]])
def test_order_that_is_no_topological_permutation_is_refused(order: list[int]) -> None:
    with pytest.raises(ValueError, match=r"permutation|parents come first"):
        TREE.permuted(order)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        pytest.param(build([1], [0]), "parents come first", id="own parent"),
        pytest.param(build([1, 2], [1, ROOT]), "parents come first", id="child first"),
        pytest.param(build([1], [-2]), "parents come first", id="parent below root"),
        pytest.param(build([1, 1], [ROOT, ROOT]), "twice a child", id="unmerged"),
        pytest.param(build([-1], [ROOT]), "negative token id", id="negative token"),
        pytest.param(build([1], [ROOT, ROOT]), "num_parents=2", id="lengths"),
        pytest.param(build([1], [ROOT], 1), "names node 1", id="proposal for no node"),
    ],
)
def test_broken_tree_is_refused(tree: TokenTree, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree.check_integrity()
