"""The orchestrator as a process: settings, port file, one trace, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import rag_pb2, rag_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.settings import SettingsError, read_settings
from specrag_orchestrator.settings import OrchestratorSettings

from tests.orchestrator.mesh import Mesh, make_passages, make_request, running_mesh
from tests.orchestrator.scripted_target import DraftScript, TargetScript, script_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TEXT = "One two three four five six seven."


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"SPECRAG_ORCHESTRATOR_{name}", value)


def test_drafter_addresses_are_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(
        monkeypatch,
        RETRIEVER_ADDRESS="r:1",
        VERIFIER_ADDRESS="v:1",
        DRAFTER_ADDRESSES="a:1, b:2,",
    )
    assert read_settings(OrchestratorSettings).drafter_addresses == ("a:1", "b:2")


def test_missing_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, RETRIEVER_ADDRESS="r:1")
    with pytest.raises(SettingsError, match="SPECRAG_ORCHESTRATOR_VERIFIER_ADDRESS is not set"):
        read_settings(OrchestratorSettings)


@contextlib.asynccontextmanager
async def running_process(mesh: Mesh, folder: Path) -> AsyncIterator[tuple[Any, int]]:
    """Run ``python -m specrag_orchestrator`` beside a mesh; yields the process and its port."""
    prefix = "SPECRAG_ORCHESTRATOR_"
    port_file = folder / "port"
    settings = {
        "RETRIEVER_ADDRESS": "127.0.0.1:1",
        "VERIFIER_ADDRESS": f"127.0.0.1:{mesh.verifier_server.port}",
        "DRAFTER_ADDRESSES": ",".join(f"127.0.0.1:{one.port}" for one in mesh.drafter_servers),
        "PORT_FILE": str(port_file),
        "TRACE_FILE": str(folder / "trace.jsonl"),
        "DRAIN_NOTICE_S": "0",
    }
    inherited = dict(os.environ)  # noqa: TID251 - handed to a child process
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "specrag_orchestrator"),
        env=inherited | {prefix + name: value for name, value in settings.items()},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(20):
            while not port_file.exists():
                assert process.returncode is None, "the process ended"
                await asyncio.sleep(0.02)
        yield process, int(port_file.read_text())
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.integration
async def test_one_answer_is_one_trace_and_sigterm_lets_it_finish(tmp_path: Path) -> None:
    target = TargetScript(script_of(TEXT), step_s=0.02)
    drafts = [DraftScript(script_of(TEXT), wrong_every=4), DraftScript(script_of(TEXT[5:]))]
    async with (
        running_mesh(target, drafts) as mesh,
        running_process(mesh, tmp_path) as (process, port),
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub: rag_pb2_grpc.RagServiceAsyncStub = rag_pb2_grpc.RagServiceStub(channel)
        alone: Any = stub.Answer(make_request(policy=rag_pb2.ANSWER_POLICY_TARGET_ONLY))
        assert [response async for response in alone][-1].event.finished.answer == TEXT
        call: Any = stub.Answer(make_request(passages=make_passages(2)))
        trace_id = (await call.read()).event.retrieval_done.trace_id
        process.send_signal(signal.SIGTERM)
        events = [response.event async for response in call]
        assert events[-1].finished.answer == TEXT
        assert events[-1].finished.trace_id == trace_id
        assert await asyncio.wait_for(process.wait(), 10) == 0
    spans = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    ours = [span for span in spans if span["trace_id"] == trace_id]
    names = [span["name"] for span in ours]
    assert names.count("specrag.v1.RagService/Answer") == 1
    assert names.count("specrag.v1.VerifierService/VerifyTokens") == 1
    assert names.count("specrag.draft") == names.count("specrag.v1.DrafterService/DraftTokens") == 2
    assert names.count("specrag.partition") == 1
    assert names.count("specrag.round") == events[-1].finished.stats.rounds
    rounds = [span["attributes"] for span in ours if span["name"] == "specrag.round"]
    assert sum(one.get("specrag.num_accepted_tokens", 0) for one in rounds) == (
        events[-1].finished.stats.num_accepted_tokens
    )
    assert {span["status"] for span in spans} <= {"UNSET", "OK"}, "an orderly end is no fault"
    by_id = {span["span_id"]: span for span in ours}
    roots = [span["name"] for span in ours if span["parent_id"] not in by_id]
    assert roots == ["specrag.v1.RagService/Answer"]


@pytest.mark.integration
async def test_health_and_reflection_are_served() -> None:
    async with (
        running_mesh(TargetScript(script_of(TEXT))) as mesh,
        grpc.aio.insecure_channel(f"127.0.0.1:{mesh.port}") as channel,
    ):
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "specrag.v1.RagService"):
            response = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert response.status == health_pb2.HealthCheckResponse.SERVING
