"""What a session remembers of its drafters reaches its next turn, and nothing else does."""

from __future__ import annotations

from datetime import UTC, datetime

from specrag_common.sessions.model import Session, SessionInfo, SessionKey, Turn, TurnOutcome
from specrag_common.speculation.acceptance import AcceptanceHistory, RoundOutcome
from specrag_common.speculation.joint_history import JointHistory
from specrag_orchestrator.answering.draft_memory import DraftMemory, recall

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def session_after(states: dict[str, dict[str, float]]) -> Session:
    turn = Turn(
        request_id="",
        answer_id="a",
        question="Who?",
        passages=(),
        answer_text="Nobody.",
        answer_token_ids={},
        citations=(),
        finish_reason="stop",
        is_partial=False,
        started_at=NOW,
        finished_at=NOW,
        outcome=TurnOutcome(
            policy="joint", mode="rejection", random_key_hex="", draft_lengths=states
        ),
    )
    info = SessionInfo(key=SessionKey(tenant="t", session_id="s"), collection="c")
    return Session(info=info, turns=(turn,))


def make_memory() -> DraftMemory:
    history = AcceptanceHistory.begin(1.0).observe(
        RoundOutcome(gamma=4, accepted_by_rank=(2, 3), nodes_by_rank=(4, 2))
    )
    return DraftMemory(histories={"host:1": history}, joint=JointHistory(pause=64))


def test_memory_comes_back_as_it_was_left() -> None:
    memory = make_memory()
    assert recall(session_after(memory.to_log())) == memory


def test_turn_without_drafters_remembers_nothing() -> None:
    assert DraftMemory().to_log() == {}
    assert recall(session_after({})) == recall(None) == DraftMemory()


def test_what_cannot_be_read_is_forgotten_and_the_rest_kept() -> None:
    memory = make_memory()
    states = {**memory.to_log(), "host:2": {"accepted": 2.0}, "*": {"pause": -1.0}}
    assert recall(session_after(states)) == DraftMemory(histories=memory.histories)
