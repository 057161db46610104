"""What the round machine knows of each drafter of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.acceptance import AcceptanceHistory
from specrag_common.speculation.controller import DrafterOutlook

from specrag_orchestrator.answering.waiting import DrafterPace

if TYPE_CHECKING:
    from specrag_common.speculation.acceptance import RoundOutcome
    from specrag_common.wire.proposals import KeyedProposal
    from specrag_common.wire.rounds import RoundKey

    from specrag_orchestrator.answering.stats import DrafterTally


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
        history: its acceptance in this session.
        pace: how fast it answers; shared with other answers.
        is_lost: it failed and takes part no more.
        asked: the round it owes a proposal for.
        unsent: committed tokens it has not been told yet.
    """

    index: int
    tally: DrafterTally
    history: AcceptanceHistory = field(default_factory=AcceptanceHistory.begin)
    pace: DrafterPace = field(default_factory=DrafterPace)
    is_lost: bool = False
    asked: AskedRound | None = None
    unsent: list[int] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Whether it can be asked."""
        return not self.is_lost and self.asked is None

    def look(self, *, is_waited_for: bool) -> DrafterOutlook:
        """Return what the choice of the next round's shape looks at."""
        if not is_waited_for:
            return DrafterOutlook(index=self.index, history=self.history)
        return DrafterOutlook(
            index=self.index,
            history=self.history,
            reply_s=self.pace.reply_s,
            token_s=self.pace.token_s,
        )

    def note_answer(self, keyed: KeyedProposal, *, now: float) -> AskedRound | None:
        """Settle what the drafter owed; returns it, or ``None`` for an answer nobody asked for."""
        asked, self.asked = self.asked, None
        if asked is not None and asked.key.round > 0:
            # The first one waits for the subset's prefill and says nothing about later rounds.
            self.pace.observe(
                now - asked.sent_s,
                draft_s=keyed.draft_time_us / 1e6,
                gamma=asked.gamma if keyed.proposal.branches else 0,
            )
        return asked

    def observe(self, outcome: RoundOutcome | None, *, num_tokens: int) -> None:
        """Learn from a round in which drafters were asked.

        Args:
            outcome: of its proposal; ``None`` when it took no part.
            num_tokens: tokens that were committed.
        """
        faded = self.history.fade(num_tokens)
        self.history = faded.forget(num_tokens) if outcome is None else faded.observe(outcome)

    def pass_by(self, *, num_tokens: int) -> None:
        """Note tokens that the target decoded alone."""
        self.history = self.history.fade(num_tokens)
