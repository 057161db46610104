"""An engine in a child process: first message, work, stats, ends."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import EngineConfig
from specrag_inference.engine_stats import EngineStats
from specrag_inference.messages import (
    EngineCrashed,
    EngineReady,
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    ScoreTree,
    SequenceFailed,
    SequenceOpened,
    StatsRequest,
    TreeScored,
    VerifyTree,
)
from specrag_inference.plan import EnginePlan
from specrag_inference.serve import run_engine
from specrag_inference.testing import save_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

Start = Callable[[str], tuple[SpawnProcess, Connection]]

TIMEOUT_S = 60


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    context = multiprocessing.get_context("spawn")
    processes: list[SpawnProcess] = []

    def start_process(model: str) -> tuple[SpawnProcess, Connection]:
        ours, theirs = context.Pipe()
        plan = EnginePlan(
            model=model,
            cache_dir=tmp_path,
            dtype="fp32",
            num_threads=1,
            engine=EngineConfig(num_blocks=64),
        )
        process = context.Process(target=run_engine, args=(theirs, plan))
        process.start()
        theirs.close()
        processes.append(process)
        return process, ours

    yield start_process
    for process in processes:
        process.kill()
        process.join(TIMEOUT_S)


def receive(connection: Connection) -> Any:
    assert connection.poll(TIMEOUT_S), "the engine process does not answer"
    return connection.recv()


def receive_events(connection: Connection, count: int) -> list[Any]:
    events: list[Any] = []
    while len(events) < count:
        events += receive(connection)
    return events


def test_process_announces_its_model_serves_batches_and_ends_on_none(
    start: Start, model_folder: Path
) -> None:
    process, connection = start(str(model_folder))
    ready = receive(connection)
    assert isinstance(ready, EngineReady)
    assert ready.vocab_size == 259
    assert ready.eos_token_ids == {258}
    connection.send(
        (
            OpenSequence(
                sequence_id="a",
                prompt_token_ids=tuple(b"hello"),
                sampling=SamplingParams(max_tokens=4),
            ),
            VerifyTree(sequence_id="ghost", round=0, tree=TokenTree.empty()),
        )
    )
    failed, opened = receive_events(connection, 2)
    assert isinstance(failed, SequenceFailed)
    assert isinstance(opened, SequenceOpened)
    connection.send(VerifyTree(sequence_id="a", round=0, tree=TokenTree.empty(), free_run_tokens=9))
    rounds = receive_events(connection, 4)
    connection.send(
        ScoreTree(
            sequence_id="a",
            score_id=3,
            token_ids=np.array([1, 2], dtype=np.int32),
            parent_idx=np.array([-1, 0], dtype=np.int32),
        )
    )
    (scored,) = receive_events(connection, 1)
    assert isinstance(scored, TreeScored)
    assert (scored.logprobs < 0).all()
    assert all(isinstance(event, RoundVerified) for event in rounds)
    connection.send((FreeSequence(sequence_id="a"), StatsRequest()))
    stats = receive(connection)
    assert isinstance(stats, EngineStats)
    assert stats.num_free_blocks == 64
    os.kill(process.pid or 0, signal.SIGTERM)
    connection.send(StatsRequest())
    assert isinstance(receive(connection), EngineStats)
    connection.send(None)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0


@pytest.fixture
def kept_signals() -> Iterator[None]:
    """Put the signal handlers back that the engine loop replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("kept_signals")
def test_closed_connection_ends_the_loop_without_an_error(
    model_folder: Path, tmp_path: Path
) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    run_engine(theirs, EnginePlan(model=str(model_folder), cache_dir=tmp_path))


@pytest.mark.usefixtures("kept_signals")
def test_unknown_model_is_reported_in_one_line_and_exits_non_zero(tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    plan = EnginePlan(model="package:no_such_package/a.gguf", cache_dir=tmp_path)
    with pytest.raises(SystemExit, match="1"):
        run_engine(theirs, plan)
    crashed = receive(ours)
    assert isinstance(crashed, EngineCrashed)
    assert "no installed package has the import name 'no_such_package'" in crashed.message


@pytest.mark.usefixtures("kept_signals")
def test_fatal_error_is_reported_and_exits_non_zero(model_folder: Path, tmp_path: Path) -> None:
    ours, theirs = multiprocessing.Pipe()
    ours.send(("nonsense",))
    plan = EnginePlan(model=str(model_folder), cache_dir=tmp_path)
    with pytest.raises(SystemExit, match="1"):
        run_engine(theirs, plan)
    assert isinstance(receive(ours), EngineReady)
    crashed = receive(ours)
    assert isinstance(crashed, EngineCrashed)
    assert crashed.message == "TypeError: 'nonsense' is no engine command"


def test_process_ends_when_its_parent_is_killed(model_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        f"""
import multiprocessing, sys
from pathlib import Path
from specrag_inference.plan import EnginePlan
from specrag_inference.serve import run_engine

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    plan = EnginePlan(
        model={str(model_folder)!r}, cache_dir=Path({str(tmp_path)!r}), dtype="fp32", num_threads=1
    )
    process = context.Process(target=run_engine, args=(theirs, plan))
    process.start()
    ours.recv()
    print(process.pid, flush=True)
    sys.stdin.read()
"""
    )
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        engine_pid = int(parent.stdout.readline())
        child = os.pidfd_open(engine_pid)
        parent.kill()
    poller = select.poll()
    poller.register(child)
    assert poller.poll(TIMEOUT_S * 1000), "the engine process outlives its parent"
    os.close(child)
