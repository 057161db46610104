"""Processes that die or are told to stop in the middle of an answer."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from specrag_client.stack.polling import wait_until
from specrag_client.stack.record import read_record

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from specrag_client.stack.record import ProcessRecord

    from tests.integration.conftest import Outcome, RunningStack

pytestmark = pytest.mark.integration

QUESTION = "Who approves annual leave?"
GREEDY = ("--temperature", "0")
SEEDED = ("--temperature", "1", "--seed", "11")
LONG = "300"


def ask(*arguments: str, max_tokens: str = LONG) -> tuple[str, ...]:
    fixed = ("ask", QUESTION, "--collection", "notes", "--max-tokens", max_tokens, "--events")
    return (*fixed, *arguments)


def finished_after(
    stack: RunningStack, arguments: tuple[str, ...], interfere: Callable[[], None]
) -> dict[str, Any]:
    """Ask, interfere once text is committed, and return the last event of a complete answer."""
    process = stack.start(*arguments)
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["type"] == "commit":
            interfere()
            break
    rest, err = process.communicate(timeout=100)
    assert (process.returncode, err.decode()) == (0, "")
    events += [json.loads(line) for line in rest.splitlines()]
    assert [one["seq"] for one in events] == list(range(1, len(events) + 1))
    last: dict[str, Any] = events[-1]
    assert last["type"] == "finished"
    assert last["answer"] == "".join(one["text"] for one in events if one["type"] == "commit")
    return last


async def gone(process: ProcessRecord) -> bool:
    return await wait_until(lambda: not process.identity.is_alive(), timeout_s=60)


async def test_killed_drafters_change_no_token_and_are_named(
    tmp_path: Path, make_tiny_stack: Callable[[Path], Any]
) -> None:
    with make_tiny_stack(tmp_path) as stack:
        for sampling, name in ((GREEDY, "drafter-1"), (SEEDED, "drafter-0")):
            undisturbed = stack.run(*ask(*sampling)).events[-1]
            victim = stack.process(name)
            kill = partial(os.kill, victim.pid, signal.SIGKILL)
            disturbed = finished_after(stack, ask(*sampling), kill)
            assert disturbed["token_ids"] == undisturbed["token_ids"]
            assert len(disturbed["token_ids"]) > 20
            assert name not in lost_components(undisturbed)
            assert name in lost_components(disturbed)
            assert f"{name} was killed by SIGKILL; the others go on" in await said(stack, name)
        status = stack.run("status")
        assert status.code == 3
        assert "not running" in status.out
        again = stack.run("up", "--detach")
        assert again.code == 2
        assert "drafter-0 (not running), drafter-1 (not running)" in again.err
        stopped = [stack.process(name) for name in ("verifier", "orchestrator")]
        await answers_through_sigterm(stack, stopped)
        refused = stack.run(*ask(*GREEDY))
        assert refused.code == 3
        assert "orchestrator" in refused.err
        assert refused.err.count("\n") == 1


async def test_sigterm_to_drafter_and_retriever_lets_the_answer_finish(
    tmp_path: Path, make_tiny_stack: Callable[[Path], Any]
) -> None:
    with make_tiny_stack(tmp_path) as stack:
        for name in ("drafter-0", "retriever"):
            await answers_through_sigterm(stack, [stack.process(name)])
        refused = stack.run(*ask(*GREEDY))
        assert refused.code == 3
        assert refused.err.count("\n") == 1


async def test_killed_launcher_leaves_no_process_and_no_data_is_lost(
    tmp_path: Path, make_tiny_stack: Callable[..., Any]
) -> None:
    turn = ("ask", QUESTION, "--collection", "notes", "--session", "s", "--max-tokens", "4")
    with make_tiny_stack(tmp_path, launcher_code=-signal.SIGKILL) as stack:
        assert stack.run(*turn).code == 0
        stack.launcher.kill()
        stack.launcher.wait()
        for process in stack.record.processes:
            assert await gone(process), process.name
    with make_tiny_stack(tmp_path) as stack:
        found = stack.run("search", QUESTION, "--collection", "notes", "--json")
        assert found.json["passages"][0]["document_id"] == "leave.md"
        assert stack.run("sessions", "show", "s", "--json").json["num_turns"] == 1


def test_detached_stack_outlives_its_launcher_and_down_ends_all_of_it(
    tmp_path: Path, tiny_arguments: list[str], run_specrag: Callable[..., Outcome]
) -> None:
    where = ("--dir", str(tmp_path))
    started = run_specrag("up", "--detach", *tiny_arguments, *where)
    assert started.code == 0, started.err
    record = read_record(tmp_path / "stack.json")
    assert record is not None
    assert len(record.processes) == 7
    assert run_specrag("status", *where).code == 0
    stopped = run_specrag("down", *where)
    assert (stopped.code, "had to be killed" in stopped.err) == (0, False)
    assert record.living() == []
    again = run_specrag("down", *where)
    assert (again.code, again.out) == (0, f"nothing runs in {tmp_path}\n")


async def answers_through_sigterm(stack: RunningStack, processes: list[ProcessRecord]) -> None:
    """Stop processes in the middle of an answer; it must finish as if nothing had happened."""
    undisturbed = stack.run(*ask(*GREEDY)).events[-1]

    def stop_them() -> None:
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)

    finished = finished_after(stack, ask(*GREEDY), stop_them)
    assert finished["token_ids"] == undisturbed["token_ids"]
    for process in processes:
        assert await gone(process)
        assert f"{process.name} exited with code 0" in await said(stack, process.name)


def lost_components(finished: dict[str, Any]) -> list[str]:
    """Return who could not be reached; on a busy machine a living drafter may be late."""
    return [one["component"] for one in finished["degraded"] if one["reason"] == "UNAVAILABLE"]


async def said(stack: RunningStack, name: str) -> str:
    """Wait until the launcher has noticed an end; return all it said."""
    await wait_until(lambda: f"{name} " in stack.said_by_launcher(), timeout_s=10)
    return stack.said_by_launcher()
