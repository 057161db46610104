"""Builders of turns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from specrag_common.sessions.model import (
    SessionInfo,
    SessionKey,
    Turn,
    TurnCitation,
    TurnPassage,
)

if TYPE_CHECKING:
    from specrag_common.sessions.lease import SessionLeases
    from specrag_common.sessions.turn_log import TurnLog

KEY = SessionKey(tenant="acme", subject="ada", session_id="s1")


def make_turn(request_id: str = "r1", *, answer_text: str = "Ask the head of travel [1].") -> Turn:
    return Turn(
        request_id=request_id,
        answer_id=f"a-{request_id}",
        question="Who approves trips? 谁批准 ✈️",
        passages=(
            TurnPassage(
                number=1,
                chunk_id="c1",
                document_id="d1",
                title="Travel",
                text="Trips are approved by the head of travel.",
                start=10,
                end=51,
                score=0.5,
            ),
        ),
        repeated_passage_numbers=(3, 4),
        answer_text=answer_text,
        answer_token_ids={"sha:1": (1, 2, 49_151), "sha:2": (7,)},
        citations=(TurnCitation(number=1, chunk_id="c1", start=23, end=26),),
        finish_reason="stop_token",
        is_partial=True,
        started_at=datetime(2026, 11, 1, 12, 0, 0, 250_000, tzinfo=UTC),
        finished_at=datetime(2026, 11, 1, 12, 0, 3, tzinfo=UTC),
    )


async def add_turn(
    log: TurnLog,
    leases: SessionLeases,
    key: SessionKey,
    turn: Turn,
    *,
    collection: str = "handbook",
) -> SessionInfo:
    """Go through one turn as the orchestrator does."""
    async with await leases.acquire(key) as lease:
        session = await log.open_session(key, collection=collection)
        return await log.append_turn(
            session.info,
            turn,
            lease=lease,
            next_passage_number=session.info.next_passage_number + len(turn.passages),
        )
