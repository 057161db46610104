from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import verifier_pb2, verifier_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import UpstreamUnavailable
from specrag_common.wire.sampling import SamplingOptions
from specrag_serving.testing import AnswerSetup, HandVerifier
from specrag_verifier.servicer import SERVICE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from specrag_common.runtime.client_calls import ServiceChannel

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class ServedProcess:
    """A verifier in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, channel: ServiceChannel) -> None:
        self.process = process
        self.channel = channel
        self.stub = verifier_pb2_grpc.VerifierServiceStub(channel)

    @property
    def engine_pid(self) -> int:
        (child,) = psutil.Process(self.process.pid).children()
        return child.pid

    def find_rank(self) -> psutil.Process:
        """Return the process of rank 1; rank 0 is the engine process."""
        (rank,) = (
            child
            for child in psutil.Process(self.engine_pid).children()
            if "resource_tracker" not in " ".join(child.cmdline())
        )
        return rank

    async def watch(self) -> AsyncIterator[int]:
        health = health_pb2_grpc.HealthStub(self.channel)
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        async for status in health.Watch(request, timeout=60):
            yield status.status

    async def wait_serving(self) -> list[int]:
        """Return the statuses seen until the service was SERVING."""
        seen = []
        async for status in self.watch():
            seen.append(status)
            if status == SERVING:
                break
        return seen

    async def wait_exit(self) -> int:
        async with asyncio.timeout(10):
            return await self.process.wait()


@pytest.fixture
def environment(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment that spawned verifiers inherit; return the folder of their files."""
    for name, value in {
        "MODEL": target_folder,
        "DTYPE": "float32",
        "NUM_THREADS": 1,
        "KV_CACHE_MIB": 8,
        "PORT_FILE": tmp_path / "port",
        "TRACE_FILE": tmp_path / "trace.jsonl",
        "DRAIN_NOTICE_S": 0.1,
    }.items():
        monkeypatch.setenv(f"SPECRAG_VERIFIER_{name}", str(value))
    return tmp_path


@contextlib.asynccontextmanager
async def spawn(environment: Path) -> AsyncIterator[ServedProcess]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "specrag_verifier")
    try:
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    port = (environment / "port").read_text()
                    break
                await asyncio.sleep(0.02)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield ServedProcess(process, channel)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def setup(max_tokens: int) -> AnswerSetup:
    return AnswerSetup(answer_id="a", sampling=SamplingOptions(max_tokens=max_tokens))


async def test_engine_death_ends_streams_and_process_with_a_reason(
    environment: Path,
) -> None:
    async with spawn(environment) as served:
        with pytest.raises(UpstreamUnavailable, match="being loaded"):
            await served.stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())
        assert await served.wait_serving() == [NOT_SERVING, SERVING]
        async with HandVerifier(served.stub, setup(600)) as stream:
            await stream.wait_prefilled()
            await stream.send(free_run_tokens=600)
            os.kill(served.engine_pid, signal.SIGKILL)
            with pytest.raises(UpstreamUnavailable, match=r"engine.* is gone") as caught:
                await stream.receive()
        exit_code = await served.wait_exit()

    assert caught.value.reason == "ENGINE_GONE"
    assert exit_code == 1


async def test_sigterm_lets_a_running_answer_finish_and_leaves_one_trace(
    environment: Path,
) -> None:
    async with spawn(environment) as served:
        await served.wait_serving()
        async with HandVerifier(served.stub, setup(300)) as stream:
            await stream.wait_prefilled()
            await stream.send(free_run_tokens=300)
            served.process.terminate()
            await stream.receive()
        exit_code = await served.wait_exit()

    assert (len(stream.token_ids), stream.end) == (300, "length")
    assert exit_code == 0
    spans = {span["name"]: span for span in read_spans(environment / "trace.jsonl")}
    rpc = spans["specrag.v1.VerifierService/VerifyTokens"]
    assert spans["specrag.prefill"]["parent_id"] == rpc["span_id"]
    assert spans["specrag.verify"]["parent_id"] == rpc["span_id"]
    assert spans["specrag.verify"]["attributes"]["specrag.num_accepted_tokens"] == 0


async def test_service_that_is_killed_leaves_no_engine_and_no_rank(
    environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECRAG_VERIFIER_TP_SIZE", "2")
    async with spawn(environment) as served:
        await served.wait_serving()
        below = psutil.Process(served.process.pid).children(recursive=True)
        served.process.kill()
        _, left = await asyncio.to_thread(psutil.wait_procs, below, 5.0)

    assert len(below) >= 2
    assert left == []


async def test_lost_rank_takes_the_replica_down_and_is_named(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECRAG_VERIFIER_TP_SIZE", "2")
    monkeypatch.setenv("SPECRAG_VERIFIER_DRAIN_GRACE_S", "5")
    async with spawn(environment) as served:
        await served.wait_serving()
        info = await served.stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())
        async with HandVerifier(served.stub, setup(600)) as stream:
            await stream.wait_prefilled()
            await stream.send(free_run_tokens=600)
            served.find_rank().kill()
            with pytest.raises(UpstreamUnavailable) as caught:
                await stream.receive()
        exit_code = await served.wait_exit()

    assert info.model.tp_size == 2
    assert caught.value.reason == "ENGINE_GONE"
    assert exit_code == 1
    assert "rank 1 of 2 was killed by SIGKILL" in capfd.readouterr().err


async def test_degree_that_cannot_be_had_ends_the_start_with_the_valid_ones(
    environment: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECRAG_VERIFIER_TP_SIZE", "6")
    async with spawn(environment) as served:
        async with asyncio.timeout(60):
            assert await served.process.wait() == 1

    assert "tp_size=6 does not divide num_kv_heads=2; valid: 1, 2" in capfd.readouterr().err


def read_spans(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
