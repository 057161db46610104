from __future__ import annotations

from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_common.speculation.token_tree import TokenTree
from specrag_orchestrator.answering.best_path import choose_best_path


def merge(*branches: tuple[int, ...]) -> TokenTree:
    """Return the tree of one branch a drafter."""
    proposals = [
        DraftProposal(
            drafter_index=index,
            committed_length=0,
            branches=(
                DraftBranch(token_ids=ids, laws=(None,) * len(ids), source=DraftSource.SUFFIX),
            ),
        )
        for index, ids in enumerate(branches)
    ]
    return merge_proposals(proposals, max_draft_tokens=100)


def test_path_of_the_drafter_accepted_most_is_shown() -> None:
    tree = merge((1, 2), (3, 4, 5))
    assert choose_best_path(tree, {0: 0.2, 1: 0.9}) == (3, 4, 5)
    assert choose_best_path(tree, {0: 0.9, 1: 0.2}) == (1, 2)


def test_votes_decide_between_equally_accepted_drafters() -> None:
    assert choose_best_path(merge((1,), (2, 3), (2, 4)), {0: 0.5, 1: 0.5, 2: 0.5})[0] == 2


def test_first_proposed_wins_when_nothing_else_decides() -> None:
    assert choose_best_path(merge((7,), (8,)), {}) == (7,)


def test_empty_tree_has_no_path() -> None:
    assert choose_best_path(TokenTree.empty(), {}) == ()
