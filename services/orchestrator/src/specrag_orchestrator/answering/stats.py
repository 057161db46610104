"""Counting tokens and times of one answer.

Invariant kept: accepted + residual + bonus == completion tokens, exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.verified import VerifiedTokens


@dataclass(slots=True, kw_only=True)
class DrafterTally:
    """What one drafter contributed.

    Attributes:
        drafter_index: its index in the request.
        address: where it was reached.
        passage_numbers: numbers of the passages it read.
        num_draft_tokens: tokens it proposed that the target looked at.
        num_accepted_tokens: distinct accepted tokens that it had proposed.
        num_late_rounds: rounds in which its proposal was late or stale and left out.
        num_asked_rounds: rounds in which it could have taken part.
    """

    drafter_index: int
    address: str
    passage_numbers: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_late_rounds: int = 0
    num_asked_rounds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Speculation and times of a finished answer; times in milliseconds, 0 for what never was."""

    rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_residual_tokens: int
    num_bonus_tokens: int
    time_to_first_speculative_token_ms: float
    time_to_first_token_ms: float
    total_ms: float
    tokens_per_s: float
    retrieval_ms: float
    prefill_ms: float
    decode_ms: float
    num_retracted_chars: int
    per_drafter: tuple[DrafterTally, ...] = ()

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds; 0 without a round."""
        return 1.0 + self.num_accepted_tokens / self.rounds if self.rounds else 0.0


@dataclass(slots=True)
class AnswerTally:
    """Counts while an answer runs; one a request, begun with it."""

    clock: Callable[[], float]
    drafters: dict[int, DrafterTally] = field(default_factory=dict)
    rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_residual_tokens: int = 0
    num_bonus_tokens: int = 0
    retrieval_s: float = 0.0
    prefill_s: float = 0.0
    started: float = field(init=False)
    _prefilled: float | None = field(init=False, default=None)
    _first_speculation: float | None = field(init=False, default=None)
    _first_commit: float | None = field(init=False, default=None)
    _first_tokens: tuple[float, int] | None = field(init=False, default=None)
    _last_tokens: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Start the answer's clock."""
        self.started = self.clock()

    @property
    def num_completion_tokens(self) -> int:
        """Answer tokens so far."""
        return self.num_accepted_tokens + self.num_residual_tokens + self.num_bonus_tokens

    def note_prefilled(self, prefill_s: float) -> None:
        """The target has read the prompt."""
        self.prefill_s = prefill_s
        self._prefilled = self.clock()

    def note_speculation(self) -> None:
        """Speculative text is being shown."""
        if self._first_speculation is None:
            self._first_speculation = self.clock()

    def note_commit(self) -> None:
        """Committed text is being sent."""
        if self._first_commit is None:
            self._first_commit = self.clock()

    def note_verified(self, verified: VerifiedTokens, tree: TokenTree | None) -> None:
        """Count one target pass.

        Args:
            verified: its outcome.
            tree: what it verified; ``None`` for tokens decoded alone.
        """
        self.rounds += 1
        num_accepted = len(verified.accepted_node_idx)
        num_final = len(verified.token_ids) - num_accepted
        self.num_accepted_tokens += num_accepted
        if tree is None or not tree.num_nodes or verified.has_bonus:
            self.num_bonus_tokens += num_final
        else:
            self.num_residual_tokens += num_final
        if tree is not None:
            self.num_draft_tokens += len(tree.proposals)
            self._credit_drafters(tree, set(verified.accepted_node_idx))
        self._note_tokens(len(verified.token_ids))

    def build(self, *, num_retracted_chars: int) -> AnswerStats:
        """Return the figures as they stand now."""
        now = self.clock()
        return AnswerStats(
            rounds=self.rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            num_residual_tokens=self.num_residual_tokens,
            num_bonus_tokens=self.num_bonus_tokens,
            time_to_first_speculative_token_ms=self._since_start_ms(self._first_speculation),
            time_to_first_token_ms=self._since_start_ms(self._first_commit),
            total_ms=(now - self.started) * 1e3,
            tokens_per_s=self._compute_rate(),
            retrieval_ms=self.retrieval_s * 1e3,
            prefill_ms=self.prefill_s * 1e3,
            decode_ms=self._decode_s() * 1e3,
            num_retracted_chars=num_retracted_chars,
            per_drafter=tuple(self.drafters[index] for index in sorted(self.drafters)),
        )

    def _credit_drafters(self, tree: TokenTree, accepted: Collection[int]) -> None:
        credited: set[tuple[int, int]] = set()
        for proposal in tree.proposals:
            tally = self.drafters[proposal.drafter_index]
            tally.num_draft_tokens += 1
            key = (proposal.drafter_index, proposal.node_idx)
            if proposal.node_idx in accepted and key not in credited:
                credited.add(key)
                tally.num_accepted_tokens += 1

    def _note_tokens(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        now = self.clock()
        self._last_tokens = now
        if self._first_tokens is None:
            self._first_tokens = (now, num_tokens)

    def _compute_rate(self) -> float:
        """Tokens behind the first batch over the time since it; else all over the decode time."""
        if self._first_tokens is None or self._last_tokens is None:
            return 0.0
        first, num_first = self._first_tokens
        if self._last_tokens > first:
            return (self.num_completion_tokens - num_first) / (self._last_tokens - first)
        decode_s = self._decode_s()
        return self.num_completion_tokens / decode_s if decode_s > 0 else 0.0

    def _decode_s(self) -> float:
        if self._prefilled is None or self._last_tokens is None:
            return 0.0
        return max(0.0, self._last_tokens - self._prefilled)

    def _since_start_ms(self, moment: float | None) -> float:
        return 0.0 if moment is None else (moment - self.started) * 1e3


def find_late_drafters(tallies: Mapping[int, DrafterTally], owing: Collection[int]) -> list[int]:
    """Return the drafters to name as late: gone silent, or left out of a quarter of the rounds.

    One that missed a single round is not named: the answer may just have ended before it spoke.

    Args:
        tallies: by drafter index.
        owing: drafters whose proposal is still missing at the end.
    """
    return [
        index
        for index, tally in sorted(tallies.items())
        if tally.num_late_rounds > 1
        and (4 * tally.num_late_rounds >= tally.num_asked_rounds or index in owing)
    ]
