"""Merging proposals into a tree, and the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.merge import ProposalShape, allot_budget, merge_proposals
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_common.speculation.token_tree import ROOT, TokenTree

if TYPE_CHECKING:
    import random

Chain = tuple[int, ...]


def propose(
    drafter_index: int, *chains: Chain, gamma: int | None = None, committed_length: int = 0
) -> DraftProposal:
    return DraftProposal(
        drafter_index=drafter_index,
        committed_length=committed_length,
        branches=tuple(
            DraftBranch(token_ids=chain, laws=(None,) * len(chain), source=DraftSource.MODEL)
            for chain in chains
        ),
        gamma=gamma,
    )


def get_chains(tree: TokenTree) -> dict[tuple[int, int], Chain]:
    """Read each drafter's branches back from the proposals at the nodes."""
    deepest: dict[tuple[int, int], int] = {}
    levels = tree.compute_levels()
    for proposal in tree.proposals:
        key = (proposal.drafter_index, proposal.branch_idx)
        if key not in deepest or levels[proposal.node_idx] > levels[deepest[key]]:
            deepest[key] = proposal.node_idx
    return {
        key: tuple(int(tree.token_ids[node]) for node in tree.compute_path(node_idx))
        for key, node_idx in deepest.items()
    }


def test_equal_prefixes_share_nodes_and_every_proposal_is_kept() -> None:
    tree = merge_proposals([propose(0, (1, 2, 3), (1, 2)), propose(1, (1, 4))], max_draft_tokens=9)
    assert tree.num_nodes == 4
    assert tree.num_draft_tokens == 7
    assert len([item for item in tree.proposals if tree.token_ids[item.node_idx] == 1]) == 3
    assert tree.compute_children()[ROOT] == (0,)


def test_nothing_proposed_gives_the_empty_tree() -> None:
    for proposals in ([], [propose(0)], [propose(0, (1, 2))]):
        assert merge_proposals(proposals, max_draft_tokens=0).num_nodes == 0


def test_budget_takes_from_last_drawn_siblings_first() -> None:
    proposals = [propose(0, (1, 2, 3), (4, 5, 6)), propose(1, (7, 8, 9), (10, 11, 12))]
    tree = merge_proposals(proposals, max_draft_tokens=8)
    assert get_chains(tree) == {(0, 0): (1, 2, 3), (1, 0): (7, 8, 9), (0, 1): (4,), (1, 1): (10,)}


def test_budget_shortens_first_branches_evenly_when_even_they_do_not_fit() -> None:
    proposals = [propose(0, (1, 2, 3), (4,)), propose(1, (7, 8, 9))]
    tree = merge_proposals(proposals, max_draft_tokens=5)
    assert get_chains(tree) == {(0, 0): (1, 2, 3), (1, 0): (7, 8)}


def test_budget_is_counted_before_merging() -> None:
    tree = merge_proposals([propose(0, (1, 2)), propose(1, (1, 2))], max_draft_tokens=3)
    assert tree.num_draft_tokens == 3
    assert tree.num_nodes == 2


def test_branch_that_ended_early_frees_nothing_when_gamma_is_stated() -> None:
    proposals = [propose(0, (1, 2), (3, 4), gamma=2), propose(1, (5,), gamma=2)]
    assert (0, 1) not in get_chains(merge_proposals(proposals, max_draft_tokens=4))


def test_two_proposals_of_one_drafter_are_refused() -> None:
    with pytest.raises(ValueError, match="one proposal a drafter"):
        merge_proposals([propose(1, (1,)), propose(1, (2,))], max_draft_tokens=4)


def test_proposals_of_different_rounds_are_refused() -> None:
    proposals = [propose(0, (1,), committed_length=3), propose(1, (2,), committed_length=4)]
    with pytest.raises(ValueError, match="different committed lengths"):
        merge_proposals(proposals, max_draft_tokens=4)


shapes = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=5).map(
    lambda items: [
        ProposalShape(drafter_index=idx, gamma=gamma, num_branches=num_branches)
        for idx, (gamma, num_branches) in enumerate(items)
    ]
)


@given(shapes=shapes, budget=st.integers(0, 80))
def test_budget_is_filled_exactly_and_never_exceeded(
    shapes: list[ProposalShape], budget: int
) -> None:
    allotted = allot_budget(shapes, max_draft_tokens=budget)
    wanted = sum(shape.gamma * shape.num_branches for shape in shapes)
    assert sum(allotted.values()) == min(budget, wanted)
    for shape in shapes:
        lengths = [allotted[shape.drafter_index, idx] for idx in range(shape.num_branches)]
        assert all(0 <= length <= shape.gamma for length in lengths)
        assert lengths == sorted(lengths, reverse=True)


@given(
    chains=st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=3),
        max_size=4,
    ),
    budget=st.integers(0, 30),
    shuffle=st.randoms(use_true_random=False),
)
def test_merged_tree_holds_exactly_the_branches_whatever_the_order(
    chains: list[list[Chain]], budget: int, shuffle: random.Random
) -> None:
    proposals = [propose(idx, *items) for idx, items in enumerate(chains)]
    tree = merge_proposals(proposals, max_draft_tokens=budget)
    tree.check_integrity()
    assert tree.num_draft_tokens <= budget
    kept = get_chains(tree)
    for (drafter_index, branch_idx), chain in kept.items():
        assert chains[drafter_index][branch_idx][: len(chain)] == chain
    if sum(len(chain) for items in chains for chain in items) <= budget and not any(
        len(chain) < max(map(len, items)) for items in chains for chain in items
    ):
        assert len(kept) == sum(map(len, chains))
    shuffle.shuffle(proposals)
    again = merge_proposals(proposals, max_draft_tokens=budget)
    assert again.token_ids.tolist() == tree.token_ids.tolist()
    assert again.proposals == tree.proposals
