"""Merging all drafters' branches of a round into one token tree, within a budget.

Invariant kept: the output law stays the target's. So equal prefixes share a node but every proposal
is kept (a duplicate still takes its trial), and the budget is shared out *before any token is
read*, from what was asked of the drafters. A realised length can depend on drawn tokens (a branch
ends behind an end-of-sequence token), and a budget counted on it, or on merged nodes, would bias
the law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specrag_common.speculation.token_tree import ROOT, NodeProposal, TokenTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.proposals import DraftBranch, DraftProposal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalShape:
    """What was asked of one drafter: all that the budget may look at.

    Attributes:
        drafter_index: the drafter, as numbered in the request.
        gamma: tokens a branch may have.
        num_branches: branches in the proposal.
    """

    drafter_index: int
    gamma: int
    num_branches: int


def merge_proposals(proposals: Sequence[DraftProposal], *, max_draft_tokens: int) -> TokenTree:
    """Merge the proposals of one round into a tree of at most ``max_draft_tokens`` proposed tokens.

    Args:
        proposals: one per drafter, all continuing the same committed tokens; in any order.
        max_draft_tokens: budget in proposed tokens, counted before merging.

    Returns:
        The tree, nodes in topological order; equal inputs give equal trees whatever their order.

    Raises:
        ValueError: two proposals of one drafter, or of different committed lengths.
    """
    _check_proposals(proposals)
    proposals = sorted(proposals, key=lambda proposal: proposal.drafter_index)
    allotted = allot_budget(
        [_get_shape(proposal) for proposal in proposals], max_draft_tokens=max_draft_tokens
    )
    builder = _TreeBuilder()
    for proposal in proposals:
        for branch_idx, branch in enumerate(proposal.branches):
            num_tokens = allotted[proposal.drafter_index, branch_idx]
            if num_tokens:
                builder.add(proposal, branch_idx, branch.cut(num_tokens))
    return builder.build()


def allot_budget(
    shapes: Sequence[ProposalShape], *, max_draft_tokens: int
) -> dict[tuple[int, int], int]:
    """Share ``max_draft_tokens`` out: how many tokens each (drafter_index, branch_idx) may keep.

    Earlier-drawn branches come first: the first branches of all drafters, then the second, and so
    on. Branches of one rank that do not all fit are shortened to a common length; what is left over
    goes to the lowest drafter indices. A pure function of the shapes.
    """
    allotted: dict[tuple[int, int], int] = {}
    left = max(0, max_draft_tokens)
    for branch_idx in range(max((shape.num_branches for shape in shapes), default=0)):
        rank = [shape for shape in shapes if shape.num_branches > branch_idx]
        lengths = _fill_level([shape.gamma for shape in rank], left)
        left -= sum(lengths)
        for shape, length in zip(rank, lengths, strict=True):
            allotted[shape.drafter_index, branch_idx] = length
    return allotted


def _fill_level(wanted: Sequence[int], budget: int) -> list[int]:
    """Return lengths <= ``wanted`` that fill ``budget`` most evenly, the first ones favoured."""
    lengths = [0] * len(wanted)
    while budget:
        short = [idx for idx, length in enumerate(lengths) if length < wanted[idx]]
        if not short:
            break
        for idx in short[:budget]:
            lengths[idx] += 1
        budget -= min(budget, len(short))
    return lengths


def _get_shape(proposal: DraftProposal) -> ProposalShape:
    """Return what was asked of a drafter; without a stated gamma, its longest branch."""
    gamma = proposal.gamma
    if gamma is None:
        gamma = max((len(branch.token_ids) for branch in proposal.branches), default=0)
    return ProposalShape(
        drafter_index=proposal.drafter_index, gamma=gamma, num_branches=len(proposal.branches)
    )


def _check_proposals(proposals: Sequence[DraftProposal]) -> None:
    """Raise ``ValueError`` unless the proposals belong to one round and to distinct drafters."""
    drafters = [proposal.drafter_index for proposal in proposals]
    if len(set(drafters)) != len(drafters):
        raise ValueError(f"one proposal a drafter and round is allowed, got drafters {drafters}")
    lengths = {proposal.committed_length for proposal in proposals}
    if len(lengths) > 1:
        raise ValueError(f"proposals continue different committed lengths: {sorted(lengths)}")


class _TreeBuilder:
    """A trie over branches; nodes are numbered as they appear, so parents come first."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._parent_idx: list[int] = []
        self._node_of: dict[tuple[int, int], int] = {}
        self._proposals: list[NodeProposal] = []

    def add(self, proposal: DraftProposal, branch_idx: int, branch: DraftBranch) -> None:
        """Insert one branch and record its proposal at every node it passes."""
        node_idx = ROOT
        for token_id, law in zip(branch.token_ids, branch.laws, strict=True):
            node_idx = self._get_child(node_idx, token_id)
            self._proposals.append(
                NodeProposal(
                    node_idx=node_idx,
                    drafter_index=proposal.drafter_index,
                    branch_idx=branch_idx,
                    law=law,
                    sibling_kind=proposal.sibling_kind,
                )
            )

    def build(self) -> TokenTree:
        """Return the finished tree."""
        return TokenTree(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            parent_idx=np.array(self._parent_idx, dtype=np.int32),
            proposals=tuple(self._proposals),
        )

    def _get_child(self, parent: int, token_id: int) -> int:
        """Return the child of ``parent`` with ``token_id``, making it when it is missing."""
        node_idx = self._node_of.get((parent, token_id))
        if node_idx is None:
            node_idx = len(self._token_ids)
            self._node_of[parent, token_id] = node_idx
            self._token_ids.append(token_id)
            self._parent_idx.append(parent)
        return node_idx
