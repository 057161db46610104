"""The command line against a whole stack with a tiny random model."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest
from specrag_client.stack.polling import wait_until
from specrag_client.trace_tree import read_trace

from tests.integration.event_replay import rebuild

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.integration.conftest import Outcome, RunningStack

pytestmark = pytest.mark.integration

QUESTION = "Who approves annual leave?"
ASK = ("ask", QUESTION, "--collection", "notes", "--max-tokens", "48")


def test_ingest_summary_accounts_for_every_file(
    tiny_stack: RunningStack, notes_folder: Path
) -> None:
    outcome = tiny_stack.run("ingest", str(notes_folder), "--collection", "notes", "--json")
    summary = outcome.json
    assert outcome.code == 0
    assert (summary["num_documents"], summary["num_unchanged"]) == (4, 3)
    assert [(one["document_id"], one["reason"]) for one in summary["skipped"]] == [
        ("empty.txt", "EMPTY")
    ]


def test_search_finds_the_document_that_says_it(tiny_stack: RunningStack) -> None:
    outcome = tiny_stack.run("search", QUESTION, "--collection", "notes", "--top-n", "2", "--json")
    passages = outcome.json["passages"]
    assert outcome.code == 0
    assert passages[0]["document_id"] == "leave.md"
    assert len(passages) == 2


@pytest.mark.parametrize("seed", [(), ("--seed", "7", "--temperature", "1")])
def test_events_rebuild_the_answer_of_json_and_of_the_pipe(
    tiny_stack: RunningStack, seed: tuple[str, ...]
) -> None:
    events = tiny_stack.run(*ASK, *seed, "--events").events
    assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
    assert events[0]["type"] == "retrieval"
    assert events[-1]["type"] == "finished"
    answer = tiny_stack.run(*ASK, *seed, "--json").json["answer"]
    assert rebuild(events) == events[-1]["answer"] == answer
    assert tiny_stack.run(*ASK, *seed).out.removesuffix("\n") == answer.removesuffix("\n")


@pytest.mark.parametrize("seed", [(), ("--seed", "7", "--temperature", "1")])
def test_joint_gives_the_tokens_of_target_only(
    tiny_stack: RunningStack, seed: tuple[str, ...]
) -> None:
    finished = [
        tiny_stack.run(*ASK, *seed, "--policy", policy, "--events").events[-1]
        for policy in ("joint", "target-only")
    ]
    assert [one["policy"] for one in finished] == ["joint", "target-only"]
    assert finished[0]["token_ids"] == finished[1]["token_ids"]
    assert len(finished[0]["token_ids"]) > 1


def test_counts_of_tokens_add_up(tiny_stack: RunningStack) -> None:
    finished = tiny_stack.run(*ASK, "--events").events[-1]
    stats, usage = finished["stats"], finished["usage"]
    kinds = ("num_accepted_tokens", "num_residual_tokens", "num_bonus_tokens")
    assert sum(stats[kind] for kind in kinds) == usage["completion_tokens"]
    assert len(finished["token_ids"]) == usage["completion_tokens"]
    assert len(stats["per_drafter"]) == 2


def test_one_trace_spans_all_four_services(tiny_stack: RunningStack) -> None:
    trace_id = tiny_stack.run(*ASK, "--json").json["trace_id"]
    services = {"orchestrator", "retriever", "verifier", "drafter"}
    seen: set[str] = set()
    for _ in range(30):  # every process writes its spans about a second after they end
        shown = tiny_stack.run("trace", trace_id).out
        seen = {name for name in services if f"{name}: specrag." in shown}
        if seen == services:
            break
    assert seen == services


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("ask", QUESTION, "--collection", "nowhere"), "nowhere"),
        (("ask", QUESTION, "--collection", "Not A Name"), "collection"),
        (("ask", QUESTION, "--collection", "notes", "--session", "no blanks"), "session"),
        (("search", QUESTION, "--collection", "nowhere"), "nowhere"),
        (("ingest", "no/such/path", "--collection", "notes"), "no/such/path"),
        (("sessions", "show", "never-was"), "never-was"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tiny_stack: RunningStack, arguments: tuple[str, ...], named: str
) -> None:
    outcome = tiny_stack.run(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert named in outcome.err


def test_session_is_listed_shown_and_deleted(tiny_stack: RunningStack) -> None:
    for question in (QUESTION, "And who asks early?"):
        code = tiny_stack.run(
            "ask", question, "--collection", "notes", "--session", "s-1", "--max-tokens", "8"
        ).code
        assert code == 0
    listed = tiny_stack.run("sessions", "list", "--json").json["sessions"]
    assert ("s-1", 2) in [(one["session_id"], one["num_turns"]) for one in listed]
    turns = tiny_stack.run("sessions", "show", "s-1", "--json").json["turns"]
    assert [one["question"] for one in turns] == [QUESTION, "And who asks early?"]
    assert tiny_stack.run("sessions", "delete", "s-1").code == 0
    assert tiny_stack.run("sessions", "show", "s-1").code == 2


async def test_ctrl_c_ends_the_answer_in_every_service(tiny_stack: RunningStack) -> None:
    process = tiny_stack.start(
        *("ask", QUESTION, "--collection", "notes", "--max-tokens", "4000", "--events")
    )
    assert process.stdout is not None
    trace_id = json.loads(process.stdout.readline())["trace_id"]
    for line in process.stdout:
        if json.loads(line)["type"] == "commit":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.decode() == "error: interrupted\n"

    def ended() -> set[tuple[str, str]]:
        """Return the calls that are over: a span is written when it ends."""
        roots = read_trace(tiny_stack.directory / "traces", trace_id)
        return {(span.service, span.name) for root in roots for span in root.walk()}

    calls = {
        ("orchestrator", "specrag.v1.RagService/Answer"),
        ("verifier", "specrag.v1.VerifierService/VerifyTokens"),
        ("drafter", "specrag.v1.DrafterService/DraftTokens"),
    }
    assert await wait_until(lambda: calls <= ended(), timeout_s=10)


def test_question_beyond_the_context_names_the_limit(tiny_stack: RunningStack) -> None:
    outcome = tiny_stack.run("ask", "word " * 1635, "--collection", "notes")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert "8192" in outcome.err


def test_passages_beyond_the_context_are_dropped_and_counted(tiny_stack: RunningStack) -> None:
    question = "leave " * 1310
    events = tiny_stack.run(*ASK[:1], question, *ASK[2:], "--max-tokens", "8", "--events").events
    kept = [one["number"] for one in events[0]["passages"]]
    assert events[0]["num_dropped_passages"] == 3 - len(kept) > 0
    assert kept == list(range(1, len(kept) + 1))
    assert events[-1]["type"] == "finished"


def test_status_shows_every_process_healthy(tiny_stack: RunningStack) -> None:
    outcome = tiny_stack.run("status", "--json")
    shown = {one["name"]: one["health"] for one in outcome.json["processes"]}
    assert outcome.code == 0
    assert len(shown) == 7
    assert set(shown.values()) == {"healthy"}


def test_second_up_in_the_same_folder_says_it_runs(tiny_stack: RunningStack) -> None:
    outcome = tiny_stack.run("up", "--detach")
    assert (outcome.code, outcome.err) == (0, "")
    assert "runs already" in outcome.out
    assert tiny_stack.endpoint in outcome.out


def test_endpoint_serves_questions_and_says_where_documents_are_not(
    tiny_stack: RunningStack, run_specrag: Callable[..., Outcome]
) -> None:
    address = ("--endpoint", tiny_stack.endpoint)
    assert run_specrag(*ASK, *address).code == 0
    assert run_specrag("sessions", "list", *address).code == 0
    assert run_specrag("status", *address).code == 0
    refused = run_specrag("search", QUESTION, "--collection", "notes", *address)
    assert refused.code == 2
    assert "--retriever HOST:PORT" in refused.err
    retriever = ("--retriever", tiny_stack.record.retriever)
    assert run_specrag("search", QUESTION, "--collection", "notes", *address, *retriever).code == 0
