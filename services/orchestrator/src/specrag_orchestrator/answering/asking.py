"""Whether to ask drafters in the next round, and what is learned from how it went.

The choice itself is ``speculation.controller``'s; here it meets the answer's drafters. Four cases:

- the first round runs while the target reads its prompt: waiting is free, drafts cost their nodes;
- drafting pays: those are asked whose proposals are worth their cost;
- it does not: the target decodes alone for a pause, with no round trip a token, then a probe is
  made; pauses double while probes fail;
- nobody can be asked: no drafter lives (the target decodes the rest), or all still owe an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.speculation.controller import (
    RoundPlan,
    RoundPrices,
    choose_pause,
    plan_probe,
    plan_round,
)
from specrag_common.speculation.joint_history import FIRST_PAUSE

from specrag_orchestrator.answering.outcomes import collect_branches, judge_proposal

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from specrag_common.speculation.joint_history import JointHistory
    from specrag_common.speculation.proposals import DraftProposal
    from specrag_common.speculation.step_costs import StepCosts
    from specrag_common.speculation.token_tree import TokenTree

    from specrag_orchestrator.answering.draft_lines import DraftLine
    from specrag_orchestrator.answering.round_messages import RoundLimits


@dataclass(frozen=True, slots=True)
class Intent:
    """What the next round is to be: drafters are asked, or tokens are decoded alone.

    Attributes:
        plan: whom to ask and how; without asks, nobody.
        num_alone: tokens to decode alone when nobody is asked; at least 1.
    """

    plan: RoundPlan
    num_alone: int = 1


class Asking:
    """The drafting of one answer, from round to round."""

    def __init__(self, costs: StepCosts, limits: RoundLimits, joint: JointHistory) -> None:
        """Begin with what the session's earlier turns left.

        Args:
            costs: what the target's rounds cost; shared by its answers.
            limits: what rounds may cost.
            joint: what is known of the drafters together.
        """
        self._costs = costs
        self._limits = limits
        self.joint = joint
        self._is_probe_due = False
        self._is_probing = False

    def choose(self, lines: Collection[DraftLine], *, round_number: int, num_left: int) -> Intent:
        """Decide about the next round.

        Args:
            lines: all drafters of the answer.
            round_number: of the round.
            num_left: tokens the answer may still have; at least 1.
        """
        is_first = round_number == 0
        prices = self._get_prices(is_first=is_first)
        max_gamma = max(0, min(self._limits.max_gamma, num_left - 1))
        free = [line.look(is_waited_for=not is_first) for line in lines if line.is_free]
        limits = {"max_gamma": max_gamma, "max_branches": self._limits.max_branches}
        plan = plan_round(free, self.joint, prices, **limits)
        self._is_probing = False
        if not plan.asks and free and max_gamma and self._is_probe_due:
            plan = plan_probe(free, prices, **limits)
            self._is_probing = True
        self._is_probe_due = False
        if plan.asks:
            return Intent(plan)
        if all(line.is_lost for line in lines):
            return Intent(plan, num_left)
        self._is_probe_due = bool(free)
        pause = choose_pause(free, self.joint, prices) if free else FIRST_PAUSE
        return Intent(plan, min(pause, num_left))

    def compute_first_wait(self) -> float:
        """Return how long drafters are waited for once the prompt is read: a pass, no more.

        What a pass yields alone is all that can be lost by waiting for the first drafts.
        """
        return min(self._limits.waits.first_s, self._costs.plain_pass_s)

    def learn(
        self,
        lines: Mapping[int, DraftLine],
        proposals: Mapping[int, DraftProposal],
        tree: TokenTree,
        committed: tuple[int, ...],
    ) -> None:
        """Learn from a round in which drafters were asked.

        Args:
            lines: all drafters of the answer, by index.
            proposals: those that took part.
            tree: what was verified.
            committed: the tokens committed.
        """
        branches = collect_branches(tree)
        outcomes = {
            index: judge_proposal(proposal, branches.get(index, {}), committed)
            for index, proposal in proposals.items()
        }
        if len(outcomes) > 1:
            self.joint = self.joint.observe(
                [lines[idx].history.compute_survival(one.gamma) for idx, one in outcomes.items()],
                [one.num_accepted for one in outcomes.values()],
                num_nodes=tree.num_nodes,
                own=sum(one.num_nodes for one in outcomes.values()),
            )
        else:
            self.joint = self.joint.fade()
        if self._is_probing:
            self.joint = self.joint.after_probe(succeeded=len(committed) > 1)
        for index, line in lines.items():
            line.observe(outcomes.get(index), num_tokens=len(committed))

    def pass_by(self, lines: Mapping[int, DraftLine], *, num_tokens: int) -> None:
        """Note tokens that the target decoded alone: what is known of drafters ages."""
        for line in lines.values():
            line.pass_by(num_tokens=num_tokens)

    def _get_prices(self, *, is_first: bool) -> RoundPrices:
        """Return the present prices; the first round's trip to the target is due in any case."""
        costs = self._costs
        return RoundPrices(
            plain_s=costs.plain_pass_s,
            node_s=costs.token_s * costs.num_sequences,
            round_s=0.0 if is_first else costs.round_s,
            alone_s=costs.alone_s,
        )
