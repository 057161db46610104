"""Starting and stopping stacks of real processes: Redis, Milvus and stand-ins for the services."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
from specrag_client.stack.health import Health, check_processes
from specrag_client.stack.launcher import StackLauncher
from specrag_client.stack.polling import wait_until
from specrag_client.stack.processes import StackError
from specrag_client.stack.servers import find_free_port
from specrag_client.stack.state import StackPhase, inspect, stop_stack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from specrag_client.stack.options import StackOptions
    from specrag_client.stack.record import StackRecord

    Make = Callable[..., StackOptions]

pytestmark = pytest.mark.integration

ALL = ["redis", "milvus", "retriever", "verifier", "drafter-0", "drafter-1", "orchestrator"]


@asynccontextmanager
async def running(options: StackOptions) -> AsyncIterator[tuple[StackLauncher, StackRecord]]:
    launcher = StackLauncher(options, lambda _name, _state: None)
    record = await launcher.start()
    try:
        yield launcher, record
    finally:
        await launcher.stop()


def processes_under(directory: Path) -> list[str]:
    """Return the command lines of all processes that have to do with a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            variables = process.environ()
            if str(directory.parent) in variables.get("STAND_IN_NOTES", ""):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


async def test_start_brings_up_every_process_and_stop_ends_callers_first_and_leaves_none(
    options: Make, notes_file: Path
) -> None:
    chosen = options()
    async with running(chosen) as (_launcher, record):
        assert sorted(one.name for one in record.processes) == sorted(ALL)
        health = await check_processes(record.processes)
        assert set(health.values()) == {Health.HEALTHY}
        assert record.ready
        written = json.loads(_read(chosen.directory / "stack.json"))
        assert written["endpoint"] == record.endpoint
        assert inspect(chosen.directory).phase is StackPhase.RUNNING
    assert processes_under(chosen.directory) == []
    assert inspect(chosen.directory).phase is StackPhase.NONE
    started = _read(notes_file)
    assert f"orchestrator {record.redis_url} " in started
    drafters = [one.address for one in record.processes if one.name.startswith("drafter")]
    assert sorted(drafters) == sorted(_orchestrator_drafters(started))
    ended = [line.split()[0] for line in started.splitlines() if "ended" in line]
    assert ended[0] == "orchestrator"
    assert set(ended[1:4]) == {"verifier", "drafter"}
    assert ended[4:] == ["retriever"]


async def test_two_stacks_in_two_folders_do_not_clash(options: Make) -> None:
    async with running(options("one")) as (_, one), running(options("two")) as (_, two):
        addresses = [process.address for process in (*one.processes, *two.processes)]
        assert len(set(addresses)) == len(addresses)
        for record in (one, two):
            health = await check_processes(record.processes)
            assert set(health.values()) == {Health.HEALTHY}


async def test_process_that_dies_is_named_with_its_last_words(options: Make) -> None:
    chosen = options(target_model="broken")
    launcher = StackLauncher(chosen, lambda _name, _state: None)
    with pytest.raises(StackError, match="verifier exited with code 1 while starting") as caught:
        await launcher.start()
    assert "model broken is not there" in caught.value.log_tail
    assert processes_under(chosen.directory) == []
    assert inspect(chosen.directory).phase is StackPhase.NONE


async def test_process_that_never_gets_ready_is_named_when_time_is_up(options: Make) -> None:
    chosen = options(target_model="hanging", start_timeout_s=4.0)
    launcher = StackLauncher(chosen, lambda _name, _state: None)
    with pytest.raises(StackError, match=r"not healthy after 4 s: verifier \(not ready\)"):
        await launcher.start()
    assert processes_under(chosen.directory) == []


async def test_what_a_process_leaves_behind_is_ended_too(options: Make) -> None:
    chosen = options(target_model="leaky")
    async with running(chosen):
        assert any("left-behind" in one for one in processes_under(chosen.directory))
    assert processes_under(chosen.directory) == []


async def test_process_that_ignores_sigterm_is_killed_and_named(options: Make) -> None:
    chosen = options(target_model="stubborn", drain_grace_s=0.5, kill_margin_s=0.5)
    launcher = StackLauncher(chosen, lambda _name, _state: None)
    await launcher.start()
    assert await launcher.stop() == ["verifier"]
    assert processes_under(chosen.directory) == []


async def test_dead_process_makes_the_stack_broken(options: Make) -> None:
    chosen = options()
    async with running(chosen) as (launcher, record):
        victim = next(one for one in record.processes if one.name == "drafter-1")
        os.kill(victim.pid, signal.SIGKILL)
        assert await wait_until(lambda: bool(launcher.exit_codes()), timeout_s=5)
        state = inspect(chosen.directory)
        assert (state.phase, state.dead) == (StackPhase.BROKEN, ("drafter-1",))
        assert launcher.exit_codes() == {"drafter-1": -signal.SIGKILL}


async def test_stop_from_another_process_ends_everything(options: Make) -> None:
    chosen = options()
    launcher = StackLauncher(chosen, lambda _name, _state: None)
    await launcher.start()
    assert await stop_stack(chosen.directory) == []
    assert processes_under(chosen.directory) == []
    codes = launcher.exit_codes()
    assert sorted(codes) == sorted(ALL)
    assert {name: code for name, code in codes.items() if code != 0} == {"milvus": -signal.SIGTERM}


async def test_cancelled_start_leaves_nothing(options: Make) -> None:
    chosen = options()
    launcher = StackLauncher(chosen, lambda _name, _state: None)
    task = asyncio.create_task(launcher.start())
    assert await wait_until(lambda: len(launcher.record.processes) >= 4, timeout_s=10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert processes_under(chosen.directory) == []


async def test_port_taken_by_another_server_is_not_shared(options: Make) -> None:
    """Milvus would bind the same port without an error and get half of the connections."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken: int = other.getsockname()[1]
        offered = iter([taken, taken])
        launcher = StackLauncher(
            options(),
            lambda _name, _state: None,
            choose_port=lambda: next(offered, None) or find_free_port(),
        )
        record = await launcher.start()
        await launcher.stop()
    addresses = {one.name: one.address for one in record.processes}
    assert next(offered, None) is None
    assert addresses["milvus"] != f"127.0.0.1:{taken}"
    assert addresses["redis"] != f"127.0.0.1:{taken}"


async def test_unreachable_redis_url_is_an_error_that_names_it(options: Make) -> None:
    launcher = StackLauncher(options(redis_url="redis://127.0.0.1:1/0"), lambda _n, _s: None)
    with pytest.raises(StackError, match=r"Redis at redis://127.0.0.1:1/0 is unreachable"):
        await launcher.start()


async def test_given_redis_is_used_and_left_running(options: Make) -> None:
    async with running(options("one")) as (_, one):
        async with running(options("two", redis_url=one.redis_url)) as (_, two):
            assert two.redis_url == one.redis_url
            assert "redis" not in [process.name for process in two.processes]
        health = await check_processes(one.processes)
        assert set(health.values()) == {Health.HEALTHY}


def _orchestrator_drafters(notes: str) -> list[str]:
    line = next(one for one in notes.splitlines() if one.startswith("orchestrator redis"))
    return line.split()[2].split(",")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")
