"""What an answer tells its caller, and the bounded stream it is told through."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_orchestrator.answering.transcript import Commit, Retract, Speculative
from specrag_orchestrator.citations import Citation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from specrag_common.speculation.proposals import VerificationMode
    from specrag_common.wire.verified import AnswerEnd

    from specrag_orchestrator.answering.stats import AnswerStats
    from specrag_orchestrator.passages import SourcePassage
    from specrag_orchestrator.question import AnswerPolicy

MAX_QUEUED_EVENTS = 64
"""Events that may wait for a slow client before the answer itself waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalDone:
    """The passages the answer rests on.

    Attributes:
        passages: what the target reads: found for this question, best first, then earlier ones.
        num_dropped_passages: found, but without room in the target's context.
        num_dropped_turns: oldest turns left out for the same reason.
        answer_id: the answer.
        trace_id: the trace; empty outside one.
    """

    passages: tuple[SourcePassage, ...]
    num_dropped_passages: int
    num_dropped_turns: int
    answer_id: str
    trace_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Degradation:
    """Something did not work as asked; the answer's law is unchanged.

    Attributes:
        component: what, for example ``drafter-1``.
        reason: UPPER_SNAKE.
        detail: in words.
    """

    component: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens read and written."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """A token that might have stood somewhere, as text, with its natural log-probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the answer.

    Attributes:
        token_id: the token.
        text: the token alone as text.
        logprob: natural log of its probability; see the contract for temperature 0.
        top: the most likely tokens in its place, best first.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of committed tokens; the first is token ``first_token`` of the answer."""

    first_token: int
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an answer; nothing follows.

    Attributes:
        end: why it ended.
        policy: what really served it.
        mode: the verification mode that served it.
        degraded: what did not work as asked.
        usage: tokens.
        stats: speculation and times.
        session_id: empty without a session.
        answer_id: the answer.
        trace_id: the trace.
        random_key: 16 bytes: the key of every draw.
        text: the whole committed text.
        token_ids: the answer's ids, the one that ended it included.
    """

    end: AnswerEnd
    policy: AnswerPolicy
    mode: VerificationMode
    degraded: tuple[Degradation, ...]
    usage: TokenUsage
    stats: AnswerStats
    session_id: str
    answer_id: str
    trace_id: str
    random_key: bytes
    text: str
    token_ids: tuple[int, ...]


AnswerEvent = RetrievalDone | Speculative | Retract | Commit | TokenLogprobs | Citation | Finished


class EventStream:
    """A bounded queue from one answer to one caller.

    The producer waits while it is full; :meth:`end` never waits. One consumer iterates, once, and
    calls :meth:`abandon` when it leaves early.
    """

    def __init__(self, max_queued: int = MAX_QUEUED_EVENTS) -> None:
        """Begin an empty stream."""
        self._events: deque[AnswerEvent] = deque()
        self._max_queued = max_queued
        self._has_news = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_ended = False
        self._is_abandoned = False
        self._error: Exception | None = None
        self._delivered_to = 0

    @property
    def delivered_to_offset(self) -> int:
        """End of the committed text that the caller has taken."""
        return self._delivered_to

    @property
    def is_abandoned(self) -> bool:
        """Whether the caller left."""
        return self._is_abandoned

    async def put(self, event: AnswerEvent) -> None:
        """Append an event as soon as there is room; after :meth:`abandon` it is dropped."""
        while len(self._events) >= self._max_queued and not self._is_abandoned:
            self._has_room.clear()
            await self._has_room.wait()
        if not self._is_abandoned:
            self._events.append(event)
            self._has_news.set()

    def end(self, error: Exception | None = None) -> None:
        """Say that nothing follows; ``error`` is raised to the caller behind the last event."""
        self._is_ended = True
        self._error = error
        self._has_news.set()

    def end_if_open(self, error: Exception) -> None:
        """End with ``error`` unless the stream has ended."""
        if not self._is_ended:
            self.end(error)

    def abandon(self) -> None:
        """The caller left: drop what is queued, and never make the producer wait again."""
        self._is_abandoned = True
        self._events.clear()
        self._has_room.set()

    async def __aiter__(self) -> AsyncIterator[AnswerEvent]:
        """Yield the events in order, then raise the error if there is one."""
        while True:
            while self._events:
                event = self._events.popleft()
                self._has_room.set()
                if isinstance(event, Commit):
                    self._delivered_to = event.to_offset
                yield event
            if self._is_ended:
                break
            self._has_news.clear()
            await self._has_news.wait()
        if self._error is not None:
            raise self._error
