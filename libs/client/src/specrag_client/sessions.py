"""Sessions as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC
from typing import TYPE_CHECKING

from specrag_client.convert import to_citation, to_finish_reason

if TYPE_CHECKING:
    from datetime import datetime

    from specrag.v1 import rag_pb2

    from specrag_client.events import Citation, FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A conversation; times are in UTC."""

    session_id: str
    num_turns: int
    create_time: datetime
    update_time: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    """One turn; ``partial`` when the answer was cut off before its end."""

    question: str
    answer: str
    finish_reason: FinishReason
    partial: bool
    citations: tuple[Citation, ...]
    end_time: datetime
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """Some of a tenant's sessions; an empty token says that there are no more."""

    sessions: tuple[Session, ...]
    next_page_token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurns:
    """A session and some of its turns; an empty token says that there are no more."""

    session: Session
    turns: tuple[SessionTurn, ...]
    next_page_token: str


def to_session(wire: rag_pb2.Session) -> Session:
    """Return a session of the wire as a plain value."""
    return Session(
        session_id=wire.session_id,
        num_turns=wire.num_turns,
        create_time=wire.create_time.ToDatetime(tzinfo=UTC),
        update_time=wire.update_time.ToDatetime(tzinfo=UTC),
    )


def to_turn(wire: rag_pb2.SessionTurn) -> SessionTurn:
    """Return a turn of the wire as a plain value."""
    return SessionTurn(
        question=wire.question,
        answer=wire.answer,
        finish_reason=to_finish_reason(wire.finish_reason),
        partial=wire.partial,
        citations=tuple(map(to_citation, wire.citations)),
        end_time=wire.end_time.ToDatetime(tzinfo=UTC),
        request_id=wire.request_id,
    )
