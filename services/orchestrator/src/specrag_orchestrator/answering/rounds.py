"""The rounds of a jointly decoded answer, as a state machine without input or output.

A round: every free drafter is told what was committed and asked for a proposal; what arrives within
a wait that was fixed before is merged into one token tree; the target verifies it; repeat. The
driver feeds what happened and carries out the returned :class:`RoundStep`.

Invariants kept:

- nothing is decided by looking at proposed tokens: lengths, waits and budgets are functions of
  earlier rounds, so the output law stays the target's;
- a drafter owes at most one proposal. One that is late is not asked again before it has answered,
  gets everything committed meanwhile at once, and never delays a round twice;
- without a live drafter the target decodes the rest alone, with no round trip a token.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from specrag_common.speculation.joint_history import JointHistory
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.step_costs import StepCosts
from specrag_common.wire.rounds import PrefixHash, RoundKey

from specrag_orchestrator.answering.asking import Asking
from specrag_orchestrator.answering.best_path import choose_best_path
from specrag_orchestrator.answering.draft_lines import AskedRound, DraftLine
from specrag_orchestrator.answering.round_messages import (
    DraftCall,
    RoundLimits,
    RoundStep,
    VerifyCall,
)
from specrag_orchestrator.answering.round_times import RoundTimes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.controller import Ask
    from specrag_common.speculation.proposals import DraftProposal
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.proposals import KeyedProposal
    from specrag_common.wire.verified import VerifiedTokens


class _Phase(Enum):
    IDLE = "idle"
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    DONE = "done"


class RoundMismatchError(Exception):
    """The target answered a round that it was not asked for."""


class RoundMachine:
    """Decides; the driver acts. Times are seconds on any monotonic clock, given by the driver."""

    def __init__(
        self,
        answer_id: str,
        lines: Sequence[DraftLine],
        limits: RoundLimits,
        *,
        step_costs: StepCosts | None = None,
        joint: JointHistory | None = None,
    ) -> None:
        """Prepare the rounds of one answer.

        Args:
            answer_id: the answer.
            lines: its drafters; owned from here on.
            limits: what rounds may cost.
            step_costs: what the target's rounds cost; shared by its answers.
            joint: what the session's earlier turns tell of the drafters together.
        """
        self._answer_id = answer_id
        self._lines = {line.index: line for line in lines}
        self._limits = limits
        self._prefix = PrefixHash()
        self._key = self._make_key(0)
        self._phase = _Phase.IDLE
        self._is_prefilled = False
        costs = step_costs or StepCosts()
        self._asking = Asking(costs, limits, joint or JointHistory())
        self._times = RoundTimes(costs)
        self._proposals: dict[int, DraftProposal] = {}
        self._tree: TokenTree | None = None
        self.wait_until: float | None = None
        """When to call :meth:`on_wait_over`; ``None``: no wait is running."""

    @property
    def live_drafters(self) -> list[int]:
        """Drafters that have not failed."""
        return [line.index for line in self._lines.values() if not line.is_lost]

    @property
    def owing_drafters(self) -> list[int]:
        """Live drafters whose proposal has not come."""
        return [line.index for line in self._lines.values() if line.asked is not None]

    @property
    def joint(self) -> JointHistory:
        """What is known of the drafters together."""
        return self._asking.joint

    @property
    def is_done(self) -> bool:
        """Whether the answer has ended."""
        return self._phase is _Phase.DONE

    @property
    def round(self) -> int:
        """Number of the current round."""
        return self._key.round

    def begin(self, now: float) -> RoundStep:
        """Start the first round; the target may still be reading its prompt."""
        assert self._phase is _Phase.IDLE, "the rounds have begun"
        return self._begin_round(now)

    def on_prefilled(self, now: float) -> None:
        """The target has read its prompt: from now on a missing proposal costs time."""
        self._is_prefilled = True
        if self._phase is _Phase.DRAFTING and self.round == 0:
            self.wait_until = now + self._asking.compute_first_wait()

    def on_proposal(self, keyed: KeyedProposal, now: float) -> RoundStep:
        """A drafter answered; a stale answer only frees it for the next round."""
        line = self._lines[keyed.key.drafter_index]
        asked = line.note_answer(keyed, now=now)
        is_current = asked is not None and asked.key == keyed.key and asked.key.round == self.round
        if asked is None or not is_current or self._phase is not _Phase.DRAFTING:
            return RoundStep()
        self._proposals[line.index] = keyed.proposal
        step = self._close_if_complete(now)
        if step.verify_call is None and not self._is_prefilled:
            return RoundStep(speculation=self._choose_speculation(self._merge()))
        return step

    def on_drafter_lost(self, drafter_index: int) -> RoundStep:
        """A drafter failed; the others go on. What it has proposed so far stays valid."""
        line = self._lines[drafter_index]
        line.is_lost = True
        line.asked = None
        return self._close_if_complete(None) if self._phase is _Phase.DRAFTING else RoundStep()

    def on_wait_over(self) -> RoundStep:
        """The round's wait is over: go on with what is there."""
        return self._close(self.wait_until) if self._phase is _Phase.DRAFTING else RoundStep()

    def on_verified(self, verified: VerifiedTokens, now: float) -> RoundStep:
        """The target committed tokens; behind the last message of a round the next one begins.

        Raises:
            RoundMismatchError: the message belongs to another round.
        """
        if self._phase is not _Phase.VERIFYING or verified.key != self._key:
            raise RoundMismatchError(f"round {verified.key.round} was verified, not {self.round}")
        tree, self._tree = self._tree, None
        self._times.note_verified(verified, now, num_nodes=tree.num_nodes if tree else 0)
        self._commit(verified)
        if self._proposals and tree is not None:
            self._asking.learn(self._lines, self._proposals, tree, verified.token_ids)
        else:
            self._asking.pass_by(self._lines, num_tokens=len(verified.token_ids))
        if verified.end is not None:
            self._phase = _Phase.DONE
            return RoundStep(verified_tree=tree)
        if not verified.is_last_of_round:
            return RoundStep(verified_tree=tree)
        self._key = self._make_key(self.round + 1)
        return replace(self._begin_round(now), verified_tree=tree)

    def _begin_round(self, now: float) -> RoundStep:
        self._phase = _Phase.DRAFTING
        self._proposals = {}
        for line in self._lines.values():
            self._count_round(line)
        intent = self._asking.choose(
            self._lines.values(), round_number=self.round, num_left=self._num_left()
        )
        asks = intent.plan.asks
        if not asks:
            return self._close(None, free_run_tokens=intent.num_alone - 1)
        calls = tuple(
            self._ask(self._lines[index], ask, intent.plan.min_probability, now)
            for index, ask in sorted(asks.items())
        )
        self.wait_until = self._compute_wait_end(calls, now)
        return RoundStep(draft_calls=calls)

    def _count_round(self, line: DraftLine) -> None:
        if not line.is_lost:
            line.tally.num_asked_rounds += 1
            line.tally.num_late_rounds += line.asked is not None

    def _ask(self, line: DraftLine, ask: Ask, min_probability: float, now: float) -> DraftCall:
        key = replace(self._key, drafter_index=line.index)
        line.asked = AskedRound(key=key, gamma=ask.gamma, sent_s=now)
        committed, line.unsent = tuple(line.unsent), []
        return DraftCall(
            key=key,
            committed_token_ids=committed,
            gamma=ask.gamma,
            num_branches=ask.num_branches,
            min_probability=min_probability,
        )

    def _compute_wait_end(self, calls: Sequence[DraftCall], now: float) -> float | None:
        """Fix the wait of a round before it begins; the first one starts with the prefill's end."""
        waits = self._limits.waits
        if self.round == 0:
            return now + self._asking.compute_first_wait() if self._is_prefilled else None
        asked = (self._lines[call.drafter_index] for call in calls)
        return now + max(line.pace.compute_wait(waits) for line in asked)

    def _close_if_complete(self, now: float | None) -> RoundStep:
        """Close the round once nobody is left to wait for."""
        awaited = [
            line
            for line in self._lines.values()
            if line.asked is not None and line.asked.key.round == self.round
        ]
        return RoundStep() if awaited else self._close(now)

    def _close(self, now: float | None, *, free_run_tokens: int = 0) -> RoundStep:
        """Merge what arrived and hand it to the target; ``now`` only where it is worth timing."""
        for line in self._lines.values():
            if line.asked is not None and line.asked.key.round == self.round:
                line.tally.num_late_rounds += 1
        self._phase = _Phase.VERIFYING
        self.wait_until = None
        self._times.note_sent(now if self._is_prefilled else None)
        tree = self._tree = self._merge()
        if not self.live_drafters:
            free_run_tokens = self._num_left() - 1
        call = VerifyCall(key=self._key, tree=tree, free_run_tokens=free_run_tokens)
        return RoundStep(
            verify_call=call, speculation=self._choose_speculation(tree) if tree.num_nodes else None
        )

    def _commit(self, verified: VerifiedTokens) -> None:
        self._prefix.update(verified.token_ids)
        for line in self._lines.values():
            if not line.is_lost:
                line.unsent.extend(verified.token_ids)

    def _merge(self) -> TokenTree:
        return merge_proposals(
            list(self._proposals.values()), max_draft_tokens=self._limits.max_draft_tokens
        )

    def _choose_speculation(self, tree: TokenTree) -> tuple[int, ...]:
        acceptance = {line.index: line.history.acceptance for line in self._lines.values()}
        return choose_best_path(tree, acceptance)

    def _num_left(self) -> int:
        return self._limits.max_tokens - self._prefix.length

    def _make_key(self, number: int) -> RoundKey:
        return RoundKey(
            answer_id=self._answer_id,
            round=number,
            drafter_index=0,
            committed_length=self._prefix.length,
            prefix_hash=self._prefix.value,
        )
