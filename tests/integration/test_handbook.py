"""The handbook questions through a whole stack with the bundled models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.event_replay import rebuild

if TYPE_CHECKING:
    from tests.integration.conftest import RunningStack

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FILE = Path(__file__).parents[2] / "examples" / "handbook" / "questions.jsonl"
QUESTIONS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text().splitlines()]
BY_ID = {one["id"]: one for one in QUESTIONS}
DEMO = [one for one in QUESTIONS if one["demo"]]


def events_of(stack: RunningStack, question: str, *arguments: str) -> list[dict[str, Any]]:
    outcome = stack.run(
        *("ask", question, "--collection", "handbook", "--events", "--max-tokens", "64"), *arguments
    )
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.events


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: str(one["id"]))
def test_events_rebuild_the_answer(bundled_stack: RunningStack, question: dict[str, Any]) -> None:
    events = events_of(bundled_stack, question["question"])
    assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
    assert rebuild(events) == events[-1]["answer"]


@pytest.mark.parametrize("question", DEMO, ids=lambda one: str(one["id"]))
def test_demo_question_is_answered_rightly_with_a_citation_of_its_source(
    bundled_stack: RunningStack, question: dict[str, Any]
) -> None:
    session: tuple[str, ...] = ()
    if question.get("follow_up_of"):
        session = ("--session", question["id"])
        events_of(bundled_stack, BY_ID[question["follow_up_of"]]["question"], *session)
    events = events_of(bundled_stack, question["question"], *session)
    answer = events[-1]["answer"].casefold()
    assert any(accepted.casefold() in answer for accepted in question["answers"]), answer
    cited = {one["document_id"] for one in events if one["type"] == "citation"}
    assert cited & set(question["files"])
