"""What is read for a question: numbering, history, subsets."""

from __future__ import annotations

from datetime import UTC, datetime

from specrag_common.sessions.model import (
    Session,
    SessionInfo,
    SessionKey,
    Turn,
    TurnOutcome,
    TurnPassage,
)
from specrag_orchestrator.conversation import (
    build_query,
    compose_reading,
    select_subset,
    subset_numbers,
)
from specrag_orchestrator.passages import SourcePassage

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLENTY = 10**6


def passage(name: str, text: str = "") -> SourcePassage:
    return SourcePassage(chunk_id=name, text=text or f"text of {name}", collection="docs")


def turn(question: str, *numbered: tuple[int, str], answer: str = "Yes.", dropped: int = 0) -> Turn:
    return Turn(
        request_id="",
        answer_id="a",
        question=question,
        passages=tuple(
            TurnPassage(
                number=number, chunk_id=name, document_id="", title="", text=f"text of {name}"
            )
            for number, name in numbered
        ),
        answer_text=answer,
        answer_token_ids={"f": (1, 2)},
        finish_reason="stop",
        started_at=NOW,
        finished_at=NOW,
        outcome=TurnOutcome(
            policy="joint", mode="rejection", random_key_hex="", num_dropped_turns=dropped
        ),
    )


def session(*turns: Turn, next_number: int = 1) -> Session:
    key = SessionKey(tenant="t", session_id="s")
    info = SessionInfo(
        key=key, collection="docs", num_turns=len(turns), next_passage_number=next_number
    )
    return Session(info=info, turns=turns)


def test_passages_are_numbered_by_rank_from_one() -> None:
    reading = compose_reading("q", [passage("b"), passage("a")], None, max_chars=PLENTY)
    assert [(one.number, one.chunk_id) for one in reading.passages] == [(1, "b"), (2, "a")]
    assert [one.number for one in reading.conversation.last.passages] == [1, 2]


def test_equal_passages_are_read_once() -> None:
    reading = compose_reading("q", [passage("a"), passage("a")], None, max_chars=PLENTY)
    assert len(reading.passages) == 1


def test_passage_in_the_context_keeps_its_number_and_is_not_repeated() -> None:
    past = session(turn("q1", (1, "a"), (2, "b")), next_number=3)
    reading = compose_reading("q2", [passage("c"), passage("b")], past, max_chars=PLENTY)
    assert [(one.number, one.chunk_id) for one in reading.found] == [(3, "c"), (2, "b")]
    assert [one.number for one in reading.earlier] == [1]
    assert [one.number for one in reading.conversation.last.passages] == [3]
    assert [one.question for one in reading.conversation.turns] == ["q1", "q2"]


def test_changed_passage_of_the_same_name_gets_a_number_of_its_own() -> None:
    past = session(turn("q1", (1, "a")), next_number=2)
    reading = compose_reading("q2", [passage("a", "new words")], past, max_chars=PLENTY)
    assert [one.number for one in reading.found] == [2]


def test_turn_without_an_answer_is_not_read_and_its_passages_come_again() -> None:
    past = session(turn("q1", (1, "a"), answer=""), next_number=2)
    reading = compose_reading("q2", [passage("a")], past, max_chars=PLENTY)
    assert len(reading.conversation.turns) == 1
    assert [one.number for one in reading.conversation.last.passages] == [1]


def test_turns_that_left_the_context_stay_out() -> None:
    past = session(turn("q1", (1, "a")), turn("q2", (2, "b"), dropped=1), next_number=3)
    reading = compose_reading("q3", [passage("a")], past, max_chars=PLENTY)
    assert [one.question for one in reading.conversation.turns] == ["q2", "q3"]
    assert reading.num_skipped_turns == 1
    assert [one.number for one in reading.conversation.last.passages] == [1]


def test_history_beyond_the_limit_leaves_oldest_turns_out() -> None:
    past = session(*(turn(f"q{idx}", (idx + 1, f"p{idx}")) for idx in range(5)), next_number=6)
    reading = compose_reading("now", [], past, max_chars=40)
    assert [one.question for one in reading.conversation.turns] == ["q3", "q4", "now"]


def test_dropped_turns_are_counted_in_turns_of_the_session() -> None:
    past = session(turn("q1", answer=""), turn("q2", (1, "a")), turn("q3", (2, "b")), next_number=3)
    reading = compose_reading("q4", [passage("a")], past, max_chars=PLENTY)
    assert reading.count_dropped_turns(0) == 0
    assert reading.count_dropped_turns(1) == 2
    assert reading.find_missing({2}) == {1}
    assert reading.find_missing({1, 2}) == frozenset()


def test_subsets_cover_every_passage_once_and_are_stable_over_turns() -> None:
    past = session(turn("q1", (1, "a"), (2, "b"), (3, "c")), next_number=4)
    reading = compose_reading("q2", [passage("d"), passage("e")], past, max_chars=PLENTY)
    subsets = [
        [[one.number for one in each.passages] for each in select_subset(reading, idx, 2).turns]
        for idx in range(2)
    ]
    assert subsets == [[[1, 3], [5]], [[2], [4]]]
    assert [subset_numbers(reading, idx, 2) for idx in range(2)] == [(1, 3, 5), (2, 4)]


def test_follow_up_is_searched_together_with_the_questions_before_it() -> None:
    past = session(*(turn(f"q{idx}") for idx in range(4)))
    assert build_query("and who?", past) == "q2\nq3\nand who?"
    assert build_query("what?", None) == "what?"


def test_query_is_never_longer_than_the_retriever_takes() -> None:
    query = build_query("end", session(turn("x" * 9000)))
    assert len(query) == 8192
    assert query.endswith("end")
