"""What became of a proposal: by rank within its source, as the budget cut it."""

from __future__ import annotations

from specrag_common.speculation.acceptance import RoundOutcome
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_orchestrator.answering.outcomes import collect_branches, judge_proposal


def branch(*token_ids: int, source: DraftSource = DraftSource.SUFFIX) -> DraftBranch:
    return DraftBranch(token_ids=token_ids, laws=(None,) * len(token_ids), source=source)


def judge(*branches: DraftBranch, committed: tuple[int, ...], budget: int = 64) -> RoundOutcome:
    proposal = DraftProposal(drafter_index=0, committed_length=0, branches=branches, gamma=4)
    tree = merge_proposals([proposal], max_draft_tokens=budget)
    return judge_proposal(proposal, collect_branches(tree).get(0, {}), committed)


def test_each_rank_counts_what_it_got_accepted_and_the_nodes_it_added() -> None:
    outcome = judge(branch(1, 2, 3), branch(1, 5), committed=(1, 5, 9))
    assert outcome == RoundOutcome(gamma=4, accepted_by_rank=(1, 2), nodes_by_rank=(3, 1))


def test_first_branches_of_all_sources_are_of_one_rank() -> None:
    model = branch(1, 7, source=DraftSource.MODEL)
    outcome = judge(branch(1, 2), branch(4), model, committed=(1, 7, 8))
    assert outcome.accepted_by_rank == (2, 0)
    assert outcome.nodes_by_rank == (3, 1)


def test_empty_proposal_counts_for_what_was_asked() -> None:
    assert judge(committed=(1,)) == RoundOutcome(gamma=4)


def test_what_the_budget_cut_away_does_not_count() -> None:
    outcome = judge(branch(1, 2, 3, 4), branch(9, 9), committed=(1, 2, 3, 4), budget=2)
    assert outcome == RoundOutcome(gamma=4, accepted_by_rank=(2,), nodes_by_rank=(2,))
