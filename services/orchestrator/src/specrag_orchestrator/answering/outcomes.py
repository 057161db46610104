"""What became of each drafter's proposal in a verified round."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.acceptance import RoundOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from specrag_common.speculation.proposals import DraftProposal, DraftSource
    from specrag_common.speculation.token_tree import TokenTree


def collect_branches(tree: TokenTree) -> dict[int, dict[int, tuple[int, ...]]]:
    """Return every drafter's branches, by branch index, as the target sees them: after the cuts."""
    tokens = tree.token_ids.tolist()
    branches: dict[int, dict[int, list[int]]] = {}
    for proposal in tree.proposals:
        of_drafter = branches.setdefault(proposal.drafter_index, {})
        of_drafter.setdefault(proposal.branch_idx, []).append(tokens[proposal.node_idx])
    return {
        index: {branch_idx: tuple(ids) for branch_idx, ids in sorted(of_drafter.items())}
        for index, of_drafter in branches.items()
    }


@dataclass(slots=True)
class _Rank:
    """Branches of one rank: the first ones of all sources, the second ones, and so on."""

    num_accepted: int = 0
    nodes: set[tuple[int, ...]] = field(default_factory=set)


def judge_proposal(
    proposal: DraftProposal, branches: dict[int, tuple[int, ...]], committed: Sequence[int]
) -> RoundOutcome:
    """Return what became of a proposal.

    Args:
        proposal: as the drafter sent it; states what was asked of it.
        branches: its branches in the tree, by branch index.
        committed: the tokens that were committed.
    """
    ranks: list[_Rank] = []
    seen: set[tuple[int, ...]] = set()
    for rank_idx, ids in _rank_branches(proposal, branches):
        while len(ranks) <= rank_idx:
            ranks.append(_Rank())
        rank = ranks[rank_idx]
        rank.num_accepted = max(rank.num_accepted, count_leading(ids, committed))
        added = {ids[: end + 1] for end in range(len(ids))} - seen
        rank.nodes |= added
        seen |= added
    return RoundOutcome(
        gamma=max(proposal.gamma or 0, max(map(len, branches.values()), default=0), 1),
        accepted_by_rank=tuple(rank.num_accepted for rank in ranks),
        nodes_by_rank=tuple(len(rank.nodes) for rank in ranks),
    )


def count_leading(token_ids: Iterable[int], committed: Iterable[int]) -> int:
    """Return how many leading ids agree."""
    count = 0
    for one, other in zip(token_ids, committed, strict=False):
        if one != other:
            break
        count += 1
    return count


def _rank_branches(
    proposal: DraftProposal, branches: dict[int, tuple[int, ...]]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (rank within its source, token ids) of the branches that are in the tree."""
    next_rank: dict[DraftSource, int] = {}
    for branch_idx, branch in enumerate(proposal.branches):
        rank_idx = next_rank.get(branch.source, 0)
        next_rank[branch.source] = rank_idx + 1
        if branch_idx in branches:
            yield rank_idx, branches[branch_idx]
