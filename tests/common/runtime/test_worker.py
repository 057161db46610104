from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from specrag_common.runtime.errors import Capacity, ModelFailure
from specrag_common.runtime.worker import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from specrag_common.runtime.worker_channel import WorkerChannel

CHILD = """
import os, signal, sys, time

def serve(connection, ready):
    connection.send(["", ready])
    while True:
        key, what, *rest = connection.recv()
        if what == "echo":
            connection.send([key, *rest])
        elif what == "count":
            for number in range(rest[0]):
                connection.send([key, number])
        elif what == "batch":
            connection.send(tuple([each, number] for number in range(3) for each in rest))
        elif what == "sleep":
            time.sleep(rest[0])
        elif what == "die":
            os._exit(7)
        elif what == "raise":
            raise ValueError("no blocks left")
        elif what == "busy":
            connection.send([key, "busy"])
            while True:
                sum(range(10_000))
        elif what == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            connection.send([key, "stubborn"])
            while True:
                time.sleep(1)
        elif what == "unreadable":
            connection.send_bytes(b"not a pickle")

def refuse(connection):
    raise ValueError("tp_size=6 does not divide num_kv_heads=8")

def mute(connection):
    connection.recv()
"""


class StartWorker(Protocol):
    async def __call__(self, **options: Any) -> WorkerProcess: ...


def key_of(event: Any) -> str:
    key: str = event[0]
    return key


@pytest.fixture(autouse=True)
def child_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "worker_under_test.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
async def start() -> AsyncIterator[StartWorker]:
    workers: list[WorkerProcess] = []

    async def begin(**options: Any) -> WorkerProcess:
        worker = WorkerProcess("worker_under_test:serve", ("ready",), key_of=key_of, **options)
        workers.append(worker)
        assert await worker.start() == ["", "ready"]
        return worker

    yield begin
    for worker in workers:
        await worker.stop(grace_s=2.0)


async def test_events_reach_the_channel_of_their_key_in_order(start: StartWorker) -> None:
    worker = await start()
    channels = {key: worker.open(key) for key in "abc"}

    for key, channel in channels.items():
        channel.send((key, "count", 100))
    received = {
        key: [await channel.receive() for _ in range(100)] for key, channel in channels.items()
    }

    assert received == {key: [[key, number] for number in range(100)] for key in "abc"}


async def test_unknown_keys_are_dropped_and_counted(start: StartWorker) -> None:
    worker = await start()
    worker.send(("nobody", "count", 3))
    channel = worker.open("a")
    channel.send(("a", "echo", 1))

    assert await channel.receive() == ["a", 1]
    assert worker.num_dropped == 3


async def test_events_without_a_key_go_to_their_callback() -> None:
    unkeyed: list[Any] = []
    worker = WorkerProcess(
        "worker_under_test:serve",
        ("ready",),
        key_of=lambda event: event[0],
        on_unkeyed=unkeyed.append,
    )
    await worker.start()
    channel = worker.open("a")
    channel.send((None, "echo", "stats"))
    channel.send(("a", "echo", 1))
    await channel.receive()
    await worker.stop()

    assert unkeyed == [[None, "stats"]]


async def test_members_of_a_batch_go_to_their_own_channels(start: StartWorker) -> None:
    worker = await start()
    first, second = worker.open("a"), worker.open("b")

    worker.send(("", "batch", "a", "nobody", "b"))

    for channel in (first, second):
        assert [await channel.receive() for _ in range(3)] == [[channel.key, n] for n in range(3)]
    assert worker.num_dropped == 3


async def test_busy_child_blocks_neither_the_loop_nor_the_sender(start: StartWorker) -> None:
    worker = await start()
    channel = worker.open("a")
    channel.send(("a", "sleep", 0.5))
    began = time.perf_counter()

    for _ in range(64):
        channel.send(("a", "echo", b"x" * 100_000))
    slowest = 0.0
    while time.perf_counter() - began < 0.4:
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        slowest = max(slowest, time.perf_counter() - before)

    assert slowest < 0.1
    assert len([await channel.receive() for _ in range(64)]) == 64


async def test_child_that_lags_behind_makes_sending_fail_but_never_the_farewell(
    start: StartWorker,
) -> None:
    worker = await start(max_outgoing=10)
    channel = worker.open("a")
    channel.send(("a", "sleep", 0.3))
    with pytest.raises(Capacity, match="10 messages behind"):
        send_many(channel, 2000)
    other = worker.open("b")

    channel.close(("b", "echo", "bye"))

    assert await other.receive() == ["b", "bye"]


def send_many(channel: WorkerChannel, count: int) -> None:
    for _ in range(count):
        channel.send(("a", "echo", b"x" * 10_000))


async def test_channel_nobody_reads_fails_alone(start: StartWorker) -> None:
    worker = await start(max_pending=50)
    slow, other = worker.open("slow"), worker.open("other")
    slow.send(("slow", "count", 200))
    other.send(("other", "echo", 1))

    assert await other.receive() == ["other", 1]
    assert [(await slow.receive())[1] for _ in range(50)] == list(range(50))
    with pytest.raises(Capacity, match="50 unread events"):
        await slow.receive()


async def test_cancelled_receive_loses_no_event(start: StartWorker) -> None:
    worker = await start()
    channel = worker.open("a")
    for number in range(50):
        waiting = asyncio.create_task(channel.receive())
        await asyncio.sleep(0)
        channel.send(("a", "echo", number))
        await asyncio.sleep(0.002 * (number % 2))
        waiting.cancel()
        try:
            assert (await waiting)[1] == number
        except asyncio.CancelledError:
            assert (await channel.receive())[1] == number


async def test_closed_key_may_be_opened_again(start: StartWorker) -> None:
    worker = await start()
    with worker.open("a"):
        assert worker.num_open == 1
    assert worker.num_open == 0

    with worker.open("a") as channel:
        channel.send(("a", "echo", 1))
        assert await channel.receive() == ["a", 1]


@pytest.mark.parametrize(
    ("last", "reason"),
    [("die", "exit code 7"), ("raise", "ValueError: no blocks left"), ("unreadable", "be read")],
)
async def test_death_fails_every_channel_after_its_last_events_and_is_told_once(
    start: StartWorker, last: str, reason: str
) -> None:
    told: list[str] = []
    worker = await start(on_death=told.append)
    first, second = worker.open("a"), worker.open("b")
    first.send(("a", "echo", 1))
    first.send(("a", last))

    with pytest.raises(ModelFailure, match=reason):
        await second.receive()
    assert await first.receive() == ["a", 1]
    with pytest.raises(ModelFailure, match=reason):
        await first.receive()
    with pytest.raises(ModelFailure):
        first.send(("a", "echo", 2))
    with pytest.raises(ModelFailure):
        worker.open("c")
    first.close(("a", "echo", 3))

    assert len(told) == 1
    assert not worker.is_alive


async def test_kill_9_of_the_child_is_noticed_at_once(start: StartWorker) -> None:
    worker = await start()
    channel = worker.open("a")
    assert worker.pid is not None

    os.kill(worker.pid, signal.SIGKILL)

    async with asyncio.timeout(1):
        with pytest.raises(ModelFailure, match="exit code -9"):
            await channel.receive()


async def test_message_that_cannot_be_pickled_hurts_its_sender_alone(start: StartWorker) -> None:
    worker = await start()
    channel = worker.open("a")

    with pytest.raises((pickle.PicklingError, AttributeError)):
        channel.send(lambda: None)

    channel.send(("a", "echo", 1))
    assert await channel.receive() == ["a", 1]


async def test_child_that_fails_before_it_is_ready_tells_why() -> None:
    worker = WorkerProcess("worker_under_test:refuse", key_of=key_of)

    with pytest.raises(ModelFailure, match="tp_size=6 does not divide num_kv_heads=8"):
        await worker.start()

    assert await worker.stop() == 1


async def test_child_that_is_never_ready_is_given_up() -> None:
    worker = WorkerProcess("worker_under_test:mute", key_of=key_of)

    with pytest.raises(ModelFailure, match=r"not ready after 0\.5 s"):
        await worker.start(timeout_s=0.5)


async def test_cancelled_start_leaves_no_child_behind() -> None:
    worker = WorkerProcess("worker_under_test:mute", key_of=key_of)
    starting = asyncio.create_task(worker.start())
    await asyncio.sleep(0.5)
    assert worker.pid is not None
    starting.cancel()

    with pytest.raises(asyncio.CancelledError):
        await starting

    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


async def test_stop_of_an_idle_child_is_graceful_and_not_a_death(start: StartWorker) -> None:
    told: list[str] = []
    worker = await start(on_death=told.append)
    channel = worker.open("a")

    assert await worker.stop() == 0
    assert await worker.stop() == 0

    assert told == []
    with pytest.raises(ModelFailure, match="gone"):
        await channel.receive()


@pytest.mark.parametrize(
    ("what", "exit_code"), [("busy", -signal.SIGTERM), ("stubborn", -signal.SIGKILL)]
)
async def test_stop_ends_a_child_that_does_not_listen(
    start: StartWorker, what: str, exit_code: int
) -> None:
    worker = await start()
    channel = worker.open("a")
    channel.send(("a", what))
    await channel.receive()

    assert await worker.stop(grace_s=0.2) == exit_code


def test_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import asyncio, sys
        from specrag_common.runtime.worker import WorkerProcess

        async def main():
            worker = WorkerProcess("worker_under_test:serve", ("r",), key_of=lambda e: e[0])
            await worker.start()
            channel = worker.open("a")
            channel.send(("a", "busy"))
            await channel.receive()
            print(worker.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """)
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    parent.kill()
    parent.communicate()

    give_up = time.monotonic() + 3
    while is_running(child):
        assert time.monotonic() < give_up, "the child outlived its parent"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
