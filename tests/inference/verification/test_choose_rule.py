"""The rule follows from what was declared: drafters, branches, kinds; never from tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftLaw,
    DraftProposal,
    DraftSource,
    SiblingKind,
)
from specrag_common.speculation.token_tree import NodeProposal, TokenTree
from specrag_inference.verification.block import BlockRule
from specrag_inference.verification.enumeration import EnumeratingChooser
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions
from specrag_inference.verification.traversal import TraversalRule
from specrag_inference.verification.walk import choose_rule

from tests.inference.verification.exact_cells import KINDS, PROCESSORS, build_round
from tests.inference.verification.toy_worlds import enumerate_trees

if TYPE_CHECKING:
    from collections.abc import Collection

LAW = DraftLaw(token_ids=np.arange(3, dtype=np.int32), probs=np.full(3, 1 / 3, dtype=np.float32))


def build_proposal(
    drafter_index: int,
    *chains: tuple[int, ...],
    sampled: bool = True,
    sibling_kind: SiblingKind = SiblingKind.IID,
) -> DraftProposal:
    law = LAW if sampled else None
    return DraftProposal(
        drafter_index=drafter_index,
        committed_length=0,
        branches=tuple(
            DraftBranch(token_ids=chain, laws=(law,) * len(chain), source=DraftSource.MODEL)
            for chain in chains
        ),
        sibling_kind=sibling_kind,
    )


def choose(
    *proposals: DraftProposal, distrusted: Collection[int] = (), budget: int = 100
) -> type[VerificationRule]:
    tree = merge_proposals(proposals, max_draft_tokens=budget)
    options = WalkOptions(position=0, distrusted_drafters=distrusted)
    return type(choose_rule(tree, EnumeratingChooser(), options))


def test_one_sampled_chain_is_a_block() -> None:
    assert choose(build_proposal(0, (0, 1, 2))) is BlockRule
    assert choose(build_proposal(3, (0,))) is BlockRule


def test_one_chain_is_a_block_whatever_way_siblings_would_be_drawn() -> None:
    proposal = build_proposal(0, (0, 1), sibling_kind=SiblingKind.WITHOUT_REPLACEMENT)
    assert choose(proposal) is BlockRule


def test_two_branches_that_merged_into_a_chain_are_no_block() -> None:
    assert choose(build_proposal(0, (0, 1), (0, 1))) is TraversalRule
    assert choose(build_proposal(0, (0, 1), (0, 2))) is TraversalRule


def test_two_drafters_that_agree_are_no_block() -> None:
    assert choose(build_proposal(0, (0, 1)), build_proposal(1, (0, 1))) is TraversalRule


def test_branch_without_budget_does_not_count() -> None:
    assert choose(build_proposal(0, (0, 1), (2, 1)), budget=2) is BlockRule


def test_sampled_branch_beside_a_fixed_one_is_traversed() -> None:
    fixed = build_proposal(0, (0, 1), sampled=False)
    assert choose(fixed, build_proposal(1, (0, 1))) is TraversalRule


def test_fixed_branches_alone_are_tried_node_by_node() -> None:
    assert choose(build_proposal(0, (0, 1), (2,), sampled=False)) is RejectionRule
    assert choose() is RejectionRule


def test_distrusted_drafter_means_node_by_node() -> None:
    proposals = build_proposal(0, (0, 1)), build_proposal(1, (0, 1))
    assert choose(proposals[0], distrusted={0}) is RejectionRule
    assert choose(*proposals, distrusted={1}) is RejectionRule
    assert choose(proposals[0], distrusted={7}) is BlockRule


def test_forked_tree_that_claims_to_be_one_branch_is_no_block() -> None:
    """Nothing an honest drafter sends, but it must not break the walk."""
    nodes = [
        NodeProposal(
            node_idx=idx, drafter_index=0, branch_idx=0, law=LAW, sibling_kind=SiblingKind.IID
        )
        for idx in range(3)
    ]
    tree = TokenTree(
        token_ids=np.array([0, 1, 2], dtype=np.int32),
        parent_idx=np.array([-1, 0, 0], dtype=np.int32),
        proposals=tuple(nodes),
    )
    assert isinstance(
        choose_rule(tree, EnumeratingChooser(), WalkOptions(position=0)), TraversalRule
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_no_token_changes_the_rule(kind: str) -> None:
    """One rule for all trees that a kind of proposing can end in."""
    for processor in list(PROCESSORS)[:4]:
        round_ = build_round(kind, processor, np.float32)
        options = WalkOptions(position=0, distrusted_drafters=round_.distrusted_drafters)
        chosen = {
            type(choose_rule(tree, EnumeratingChooser(), options))
            for _, tree in enumerate_trees(round_)
        }
        assert len(chosen) == 1
