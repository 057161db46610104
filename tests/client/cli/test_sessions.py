"""``specrag sessions`` against a scripted orchestrator."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from specrag.v1 import common_pb2, rag_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.client.conftest import Outcome, RagScript

    Specrag = Callable[..., Outcome]


@pytest.fixture
def address(orchestrator: str, rag_script: RagScript) -> tuple[str, str]:
    """Arguments that name an orchestrator with two sessions."""
    first = rag_pb2.SessionTurn(
        question="Who?", answer="The lead.", finish_reason=common_pb2.FINISH_REASON_STOP
    )
    second = rag_pb2.SessionTurn(question="And when?", answer="Ear", partial=True)
    rag_script.sessions = {"s1": [first, second], "s2": [first]}
    return ("--endpoint", orchestrator)


def test_list_reads_all_pages(specrag: Specrag, address: tuple[str, str]) -> None:
    listed = json.loads(specrag("sessions", "list", "--json", *address).out)["sessions"]
    assert [(one["session_id"], one["num_turns"]) for one in listed] == [("s1", 2), ("s2", 1)]
    assert specrag("sessions", "list", *address).out.startswith("s1  2 turns  1970-01-01")


def test_show_reads_all_turns_and_marks_one_cut_off(
    specrag: Specrag, address: tuple[str, str]
) -> None:
    outcome = specrag("sessions", "show", "s1", *address)
    assert outcome.out == "? Who?\nThe lead.\n\n? And when?\nEar (cut off)\n\n"
    turns = json.loads(specrag("sessions", "show", "s1", "--json", *address).out)["turns"]
    assert [(one["finish_reason"], one["partial"]) for one in turns] == [
        ("stop", False),
        ("unspecified", True),
    ]


def test_delete_says_how_many_turns_went(specrag: Specrag, address: tuple[str, str]) -> None:
    assert specrag("sessions", "delete", "s1", *address).out == "deleted s1 with 2 turns\n"
    gone = specrag("sessions", "show", "s1", *address)
    assert (gone.code, gone.err) == (2, "error: no session s1\n")
