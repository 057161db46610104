"""A rank that is lost takes the whole replica down, by name and in time; none is left over."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil
import pytest
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    EngineCrashed,
    EngineReady,
    OpenSequence,
    SamplingParams,
    VerifyTree,
)
from specrag_inference.parallel.watch import SILENCE_LIMIT_S

from tests.inference.parallel.conftest import save_model
from tests.inference.parallel.engine_links import ProcessLink

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

StartEngine = Callable[..., ProcessLink]

LIMIT_S = 10.0


def keep_busy(link: ProcessLink) -> None:
    """Start an answer that goes on and on, and wait until it runs."""
    link.submit(
        OpenSequence(
            sequence_id="busy",
            prompt_token_ids=tuple(b"hello"),
            sampling=SamplingParams(max_tokens=300),
        )
    )
    link.events()
    link.submit(
        VerifyTree(sequence_id="busy", round=0, tree=TokenTree.empty(), free_run_tokens=299)
    )
    link.events()


def expect_crash(link: ProcessLink, ranks: list[psutil.Process]) -> str:
    """Return the last words of an engine whose rank has just been lost; check it is all gone."""
    started = time.monotonic()
    crashed = link.receive_last(LIMIT_S)
    link.process.join(LIMIT_S)
    assert isinstance(crashed, EngineCrashed), crashed
    assert time.monotonic() - started < LIMIT_S
    assert link.process.exitcode == 1
    _, left = psutil.wait_procs(ranks, timeout=LIMIT_S)
    assert left == []
    return crashed.message


def test_killed_rank_is_named_while_the_replica_idles(start_engine: StartEngine) -> None:
    link = start_engine()
    assert isinstance(link.first, EngineReady)
    ranks = link.find_ranks()
    ranks[0].kill()
    assert expect_crash(link, ranks) == "rank 1 of 2 was killed by SIGKILL"


def test_killed_rank_is_named_in_the_middle_of_a_pass(
    start_engine: StartEngine, tmp_path: Path
) -> None:
    link = start_engine(save_model(tmp_path, num_kv_heads=3), tp_size=3)
    keep_busy(link)
    ranks = link.find_ranks()
    ranks[1].kill()
    assert expect_crash(link, ranks) == "rank 2 of 3 was killed by SIGKILL"


def test_stuck_rank_is_named(start_engine: StartEngine) -> None:
    link = start_engine()
    keep_busy(link)
    ranks = link.find_ranks()
    ranks[0].suspend()
    message = expect_crash(link, ranks)
    assert message == f"rank 1 of 2 is stuck: not heard of for {SILENCE_LIMIT_S:g} s"


def test_no_rank_outlives_rank_0(start_engine: StartEngine) -> None:
    link = start_engine()
    keep_busy(link)
    ranks = link.find_ranks()
    assert len(ranks) == 1
    os.kill(link.process.pid or 0, signal.SIGKILL)
    _, left = psutil.wait_procs(ranks, timeout=LIMIT_S)
    assert left == []


def test_signals_of_the_service_leave_all_ranks_running(start_engine: StartEngine) -> None:
    link = start_engine()
    ranks = link.find_ranks()
    for number in (signal.SIGINT, signal.SIGTERM):
        link.process.terminate()
        ranks[0].send_signal(number)
    keep_busy(link)
    link.connection.close()
    link.process.join(LIMIT_S)
    assert link.process.exitcode == 0
    _, left = psutil.wait_procs(ranks, timeout=LIMIT_S)
    assert left == []


def test_refused_degree_is_told_before_anything_is_loaded(start_engine: StartEngine) -> None:
    link = start_engine(tp_size=6)
    assert link.first == EngineCrashed(
        message="tp_size=6 does not divide num_kv_heads=2; valid: 1, 2"
    )
    link.process.join(LIMIT_S)
    assert link.process.exitcode == 1


def test_rank_that_cannot_load_is_named(start_engine: StartEngine, tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    link = start_engine(folder, quantization="int8")
    assert isinstance(link.first, EngineCrashed)
    assert "quantization=int8 does not go with tp_size=2" in link.first.message
