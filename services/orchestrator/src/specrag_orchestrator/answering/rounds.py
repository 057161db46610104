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

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.step_costs import StepCosts
from specrag_common.wire.rounds import PrefixHash, RoundKey

from specrag_orchestrator.answering.best_path import choose_best_path
from specrag_orchestrator.answering.draft_lines import AskedRound, DraftLine
from specrag_orchestrator.answering.waiting import WaitBounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.proposals import DraftProposal
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.proposals import KeyedProposal
    from specrag_common.wire.verified import VerifiedTokens

IDLE_FREE_RUN: Final = 7
"""Further tokens the target decodes alone in a round for which no drafter is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """What rounds may cost.

    Attributes:
        max_tokens: most answer tokens.
        max_gamma: most tokens a branch.
        num_branches: branches a drafter and source.
        max_draft_tokens: proposed tokens a round, before merging.
        waits: how long to wait for proposals.
    """

    max_tokens: int
    max_gamma: int = 8
    num_branches: int = 1
    max_draft_tokens: int = 32
    waits: WaitBounds = field(default_factory=WaitBounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCall:
    """Tell a drafter what was committed and ask it for a proposal."""

    key: RoundKey
    committed_token_ids: tuple[int, ...]
    gamma: int
    num_branches: int

    @property
    def drafter_index(self) -> int:
        """Whom to ask."""
        return self.key.drafter_index


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCall:
    """Have the target verify a tree, then decode ``free_run_tokens`` alone."""

    key: RoundKey
    tree: TokenTree
    free_run_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStep:
    """What the driver is to do now.

    Attributes:
        draft_calls: rounds to send to drafters.
        verify_call: round to send to the target.
        speculation: tokens to show behind the committed ones; ``None``: leave what is shown.
        verified_tree: the tree that was just decided; ``None`` for tokens decoded alone.
    """

    draft_calls: tuple[DraftCall, ...] = ()
    verify_call: VerifyCall | None = None
    speculation: tuple[int, ...] | None = None
    verified_tree: TokenTree | None = None


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
    ) -> None:
        """Prepare the rounds of one answer.

        Args:
            answer_id: the answer.
            lines: its drafters; owned from here on.
            limits: what rounds may cost.
            step_costs: what the target's passes cost; shared by its answers.
        """
        self._answer_id = answer_id
        self._lines = {line.index: line for line in lines}
        self._limits = limits
        self._prefix = PrefixHash()
        self._key = self._make_key(0)
        self._phase = _Phase.IDLE
        self._is_prefilled = False
        self._step_costs = step_costs or StepCosts()
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
            self.wait_until = now + self._limits.waits.first_s

    def on_proposal(self, keyed: KeyedProposal, now: float) -> RoundStep:
        """A drafter answered; a stale answer only frees it for the next round."""
        line = self._lines[keyed.key.drafter_index]
        asked = line.note_answer(keyed, now=now)
        is_current = asked is not None and asked.key == keyed.key and asked.key.round == self.round
        if asked is None or not is_current or self._phase is not _Phase.DRAFTING:
            return RoundStep()
        self._proposals[line.index] = keyed.proposal
        step = self._close_if_complete()
        if step.verify_call is None and not self._is_prefilled:
            return RoundStep(speculation=self._choose_speculation(self._merge()))
        return step

    def on_drafter_lost(self, drafter_index: int) -> RoundStep:
        """A drafter failed; the others go on. What it has proposed so far stays valid."""
        line = self._lines[drafter_index]
        line.is_lost = True
        line.asked = None
        return self._close_if_complete() if self._phase is _Phase.DRAFTING else RoundStep()

    def on_wait_over(self) -> RoundStep:
        """The round's wait is over: go on with what is there."""
        return self._close() if self._phase is _Phase.DRAFTING else RoundStep()

    def on_verified(self, verified: VerifiedTokens, now: float) -> RoundStep:
        """The target committed tokens; behind the last message of a round the next one begins.

        Raises:
            RoundMismatchError: the message belongs to another round.
        """
        if self._phase is not _Phase.VERIFYING or verified.key != self._key:
            raise RoundMismatchError(f"round {verified.key.round} was verified, not {self.round}")
        tree, self._tree = self._tree, None
        self._commit(verified)
        if tree is not None:
            self._learn(tree, verified)
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
        calls = [call for line in self._lines.values() if (call := self._ask(line, now))]
        if not calls:
            return self._close()
        self.wait_until = self._compute_wait_end(calls, now)
        return RoundStep(draft_calls=tuple(calls))

    def _ask(self, line: DraftLine, now: float) -> DraftCall | None:
        """Ask a drafter, unless it failed, still owes a proposal, or does not pay."""
        if line.is_lost:
            return None
        line.tally.num_asked_rounds += 1
        if line.asked is not None:
            line.tally.num_late_rounds += 1
            return None
        most = min(self._limits.max_gamma, self._num_left() - 1)
        gamma = line.choose_gamma(max_gamma=max(0, most), costs=self._step_costs)
        if not gamma:
            line.observe((), ())
            return None
        key = replace(self._key, drafter_index=line.index)
        line.asked = AskedRound(key=key, gamma=gamma, sent_s=now)
        committed, line.unsent = tuple(line.unsent), []
        return DraftCall(
            key=key,
            committed_token_ids=committed,
            gamma=gamma,
            num_branches=self._limits.num_branches,
        )

    def _compute_wait_end(self, calls: Sequence[DraftCall], now: float) -> float | None:
        """Fix the wait of a round before it begins; the first one starts with the prefill's end."""
        waits = self._limits.waits
        if self.round == 0:
            return now + waits.first_s if self._is_prefilled else None
        asked = (self._lines[call.drafter_index] for call in calls)
        return now + max(line.latency.compute_wait(waits) for line in asked)

    def _close_if_complete(self) -> RoundStep:
        """Close the round once nobody is left to wait for."""
        awaited = [
            line
            for line in self._lines.values()
            if line.asked is not None and line.asked.key.round == self.round
        ]
        return RoundStep() if awaited else self._close()

    def _close(self) -> RoundStep:
        """Merge what arrived and hand it to the target."""
        for line in self._lines.values():
            if line.asked is not None and line.asked.key.round == self.round:
                line.tally.num_late_rounds += 1
        self._phase = _Phase.VERIFYING
        self.wait_until = None
        tree = self._tree = self._merge()
        call = VerifyCall(key=self._key, tree=tree, free_run_tokens=self._choose_free_run())
        return RoundStep(
            verify_call=call, speculation=self._choose_speculation(tree) if tree.num_nodes else None
        )

    def _choose_free_run(self) -> int:
        """Return how many tokens the target decodes alone behind this round's tree."""
        left = max(0, self._num_left() - 1)
        if not self.live_drafters:
            return left
        was_anyone_asked = bool(self._proposals) or any(
            line.asked is not None and line.asked.key.round == self.round
            for line in self._lines.values()
        )
        return 0 if was_anyone_asked else min(IDLE_FREE_RUN, left)

    def _commit(self, verified: VerifiedTokens) -> None:
        self._prefix.update(verified.token_ids)
        for line in self._lines.values():
            if not line.is_lost:
                line.unsent.extend(verified.token_ids)

    def _learn(self, tree: TokenTree, verified: VerifiedTokens) -> None:
        """Update the histories that lengths are chosen from."""
        self._step_costs.observe(tree.num_nodes, verified.forward_time_us / 1e6)
        branches = collect_branches(tree)
        for index in self._proposals:
            self._lines[index].observe(branches.get(index, ()), verified.token_ids)

    def _merge(self) -> TokenTree:
        return merge_proposals(
            list(self._proposals.values()), max_draft_tokens=self._limits.max_draft_tokens
        )

    def _choose_speculation(self, tree: TokenTree) -> tuple[int, ...]:
        acceptance = {line.index: line.length.acceptance for line in self._lines.values()}
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


def collect_branches(tree: TokenTree) -> dict[int, list[tuple[int, ...]]]:
    """Return every drafter's branches as the target sees them: after the budget's cuts."""
    tokens = tree.token_ids.tolist()
    branches: dict[int, dict[int, list[int]]] = {}
    for proposal in tree.proposals:
        of_drafter = branches.setdefault(proposal.drafter_index, {})
        of_drafter.setdefault(proposal.branch_idx, []).append(tokens[proposal.node_idx])
    return {
        index: [tuple(of_drafter[branch_idx]) for branch_idx in sorted(of_drafter)]
        for index, of_drafter in branches.items()
    }
