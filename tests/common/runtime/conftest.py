"""Real servers on port 0, stopped at the end of the test."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.logs import route_through_standard_logging
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.settings import ServiceSettings

from tests.common.runtime.serving import (
    SERVICE,
    Behaviours,
    Recorder,
    Running,
    Serve,
    add_behaviours,
    make_recorder,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(autouse=True)
def logs_reach_pytest() -> Iterator[None]:
    route_through_standard_logging("under-test")
    yield
    structlog.reset_defaults()


@pytest.fixture
def recorder() -> Recorder:
    return make_recorder("under-test")


@pytest.fixture
def settings() -> ServiceSettings:
    return ServiceSettings(drain_notice_s=0.0, drain_grace_s=5.0)


@pytest.fixture
async def serve(settings: ServiceSettings) -> AsyncIterator[Serve]:
    """Return a function that starts a server with the given behaviours and opens a channel."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            behaviours: Behaviours, *, recorder: Recorder | None = None, **channel: Any
        ) -> Running:
            tracer = recorder.tracer if recorder else None
            server = GrpcServer(settings, services=[SERVICE], tracer=tracer)
            add_behaviours(server.grpc, behaviours)
            await stack.enter_async_context(server)
            server.set_ready(SERVICE)
            target = f"127.0.0.1:{server.port}"
            opened = open_channel(target, tracer=tracer, **channel)
            return Running(server, await stack.enter_async_context(opened))

        yield start
