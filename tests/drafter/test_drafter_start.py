from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import ModelFailure, UpstreamUnavailable
from specrag_common.runtime.lifecycle import Lifecycle
from specrag_common.runtime.settings import SettingsError, read_settings
from specrag_common.speculation.proposals import DraftSource
from specrag_drafter.hosting import get_health_name, start_drafter
from specrag_drafter.servicer import SERVICE
from specrag_drafter.settings import DrafterSettings
from specrag_inference.prompts import ChatTokenizer
from specrag_serving.testing import AnswerSetup, HandDrafter, build_conversation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from specrag_common.runtime.client_calls import ServiceChannel

pytestmark = pytest.mark.integration

SERVING = health_pb2.HealthCheckResponse.SERVING


@contextlib.asynccontextmanager
async def starting(draft_folder: Path, tmp_path: Path) -> AsyncIterator[ServiceChannel]:
    """Give a channel to a drafter that has only begun to start."""
    settings = DrafterSettings(
        model=str(draft_folder), port_file=tmp_path / "port", drain_notice_s=0.0
    )
    lifecycle = Lifecycle()
    start = asyncio.create_task(start_drafter(settings, lifecycle))
    try:
        async with asyncio.timeout(3):
            while True:
                with contextlib.suppress(FileNotFoundError):
                    port = (tmp_path / "port").read_text()
                    break
                await asyncio.sleep(0.01)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await lifecycle.close()


async def wait_serving(channel: ServiceChannel, name: str) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    async for status in health.Watch(health_pb2.HealthCheckRequest(service=name), timeout=5):
        if status.status == SERVING:
            return


async def test_suffix_drafts_are_served_while_the_model_loads(
    draft_folder: Path, tmp_path: Path
) -> None:
    tokenizer = ChatTokenizer.from_folder(draft_folder)
    answer = AnswerSetup(answer_id="a", conversation=build_conversation("the quick brown"))

    async with starting(draft_folder, tmp_path) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        await wait_serving(channel, SERVICE)
        async with HandDrafter(stub, answer.open_drafting(tokenizer.fingerprint)) as stream:
            await stream.wait_ready()
            proposal = await stream.draft(list(b"the qui"), gamma=2)
        info = await stub.GetModelInfo(drafter_pb2.DrafterServiceGetModelInfoRequest())
        asks_model = answer.open_drafting(tokenizer.fingerprint, sources=[DraftSource.MODEL])
        with pytest.raises(UpstreamUnavailable, match="being loaded") as caught:
            async with HandDrafter(stub, asks_model) as stream:
                await stream.wait_ready()
        health = health_pb2_grpc.HealthStub(channel)
        model_health = await health.Check(
            health_pb2.HealthCheckRequest(service=get_health_name(DraftSource.MODEL))
        )

    assert [branch.token_ids for branch in proposal.branches] == [tuple(b"ck")]
    assert list(info.model.capabilities) == [common_pb2.CAPABILITY_DRAFT_SUFFIX]
    assert caught.value.reason == "MODEL_LOADING"
    assert model_health.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_reference_that_names_nothing_is_refused_at_start(tmp_path: Path) -> None:
    lifecycle = Lifecycle()
    settings = DrafterSettings(model=str(tmp_path / "nowhere"), drain_notice_s=0.0)

    try:
        with pytest.raises(ModelFailure, match="nowhere"):
            await start_drafter(settings, lifecycle)
    finally:
        await lifecycle.close()


def test_sources_are_read_as_a_comma_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRAG_DRAFTER_SOURCES", "model, suffix")

    assert read_settings(DrafterSettings).sources == (DraftSource.MODEL, DraftSource.SUFFIX)


@pytest.mark.parametrize("value", ["", "suffix,guess"])
def test_unknown_or_no_sources_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SPECRAG_DRAFTER_SOURCES", value)

    with pytest.raises(SettingsError, match="SPECRAG_DRAFTER_SOURCES"):
        read_settings(DrafterSettings)
