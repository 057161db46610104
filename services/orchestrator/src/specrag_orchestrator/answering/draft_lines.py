"""What the round machine knows of each drafter of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.length import CostModel, LengthState, choose_gamma

from specrag_orchestrator.answering.waiting import LatencyEstimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.step_costs import StepCosts
    from specrag_common.wire.proposals import KeyedProposal
    from specrag_common.wire.rounds import RoundKey

    from specrag_orchestrator.answering.stats import DrafterTally

_COST_GAIN = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRound:
    """A round that a drafter has been asked for and has not answered.

    Attributes:
        key: the round.
        gamma: tokens a branch asked for.
        sent_s: when, on the driver's clock.
    """

    key: RoundKey
    gamma: int
    sent_s: float


@dataclass(slots=True, kw_only=True)
class DraftLine:
    """One drafter's side of the rounds; changed by the round machine only.

    Attributes:
        index: the drafter's index in the request.
        tally: its figures.
        length: history of its acceptance.
        latency: history of its response times.
        is_lost: it failed and takes part no more.
        asked: the round it owes a proposal for.
        unsent: committed tokens it has not been told yet.
        draft_token_s: running mean of its drafting time a token; 0 before the first.
    """

    index: int
    tally: DrafterTally
    length: LengthState = field(default_factory=LengthState)
    latency: LatencyEstimate = field(default_factory=LatencyEstimate)
    is_lost: bool = False
    asked: AskedRound | None = None
    unsent: list[int] = field(default_factory=list)
    draft_token_s: float = 0.0

    def choose_gamma(self, *, max_gamma: int, costs: StepCosts) -> int:
        """Return the tokens a branch to ask for next.

        Args:
            max_gamma: most that make sense in this round.
            costs: what the target's passes cost.
        """
        drafting = self.draft_token_s / costs.base_s if costs.base_s > 0 else 0.0
        model = CostModel(verify_per_token=costs.slope, draft_per_token=drafting)
        return choose_gamma(self.length, model, max_gamma=max_gamma)

    def note_answer(self, keyed: KeyedProposal, *, now: float) -> AskedRound | None:
        """Settle what the drafter owed; returns it, or ``None`` for an answer nobody asked for."""
        asked, self.asked = self.asked, None
        if asked is None:
            return None
        if asked.key.round > 0:
            # The first one waits for the subset's prefill and says nothing about later rounds.
            self.latency = self.latency.observe(now - asked.sent_s)
            self._note_cost(keyed, asked.gamma)
        return asked

    def observe(self, branches: Sequence[Sequence[int]], committed: Sequence[int]) -> None:
        """Learn from a round's outcome.

        Args:
            branches: what the drafter proposed, as far as the target saw it; may be empty.
            committed: the tokens that were committed.
        """
        outcomes = [(_count_leading(branch, committed), len(branch)) for branch in branches]
        num_accepted, num_proposed = max(outcomes, default=(0, 0))
        self.length = self.length.observe(num_accepted=num_accepted, num_proposed=num_proposed)

    def _note_cost(self, keyed: KeyedProposal, gamma: int) -> None:
        if not gamma or not keyed.proposal.branches:
            return
        token_s = keyed.draft_time_us / 1e6 / gamma
        self.draft_token_s += _COST_GAIN * (token_s - self.draft_token_s)


def _count_leading(token_ids: Sequence[int], committed: Sequence[int]) -> int:
    """Return how many leading ids agree."""
    count = 0
    for one, other in zip(token_ids, committed, strict=False):
        if one != other:
            break
        count += 1
    return count
