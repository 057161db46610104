"""The whole mesh but the retriever, with tiny random models: real engines, real streams."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from specrag.v1 import rag_pb2, rag_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.lifecycle import Lifecycle
from specrag_drafter.hosting import start_drafter
from specrag_drafter.settings import DrafterSettings
from specrag_orchestrator.hosting import start_orchestrator
from specrag_orchestrator.settings import OrchestratorSettings
from specrag_serving.testing import Started, running, save_sharp_model
from specrag_verifier.hosting import start_verifier
from specrag_verifier.settings import VerifierSettings

from tests.orchestrator.mesh import Answered, make_request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_mib": 8,
    "drain_notice_s": 0.0,
}


class RealMesh:
    """The running services; every one of them has an engine process of its own."""

    def __init__(
        self, stub: rag_pb2_grpc.RagServiceAsyncStub, verifier: Started, drafters: list[Started]
    ) -> None:
        self.stub = stub
        self.verifier = verifier
        self.drafters = drafters

    async def ask(self, **fields: Any) -> Answered:
        """Ask and collect the events."""
        answered = Answered()
        async for response in self.stub.Answer(make_request(**fields), timeout=60):
            answered.take(response.event)
        return answered


@contextlib.asynccontextmanager
async def running_real_mesh(folder: Path, num_drafters: int = 2) -> AsyncIterator[RealMesh]:
    """Run a target and drafters that speak nearly alike."""
    target = save_sharp_model(folder / "target", seed=1, sharpness=2.0)
    async with contextlib.AsyncExitStack() as stack:
        verifier = await stack.enter_async_context(
            running(
                functools.partial(start_verifier, VerifierSettings(model=str(target), **ENGINE))
            )
        )
        drafters = []
        for index in range(num_drafters):
            draft = save_sharp_model(
                folder / f"draft-{index}", seed=1, sharpness=2.0, noise=0.3, noise_seed=index
            )
            settings = DrafterSettings(model=str(draft), **ENGINE)
            drafters.append(
                await stack.enter_async_context(running(functools.partial(start_drafter, settings)))
            )
        lifecycle = Lifecycle()
        stack.push_async_callback(lifecycle.close)
        server = await start_orchestrator(
            OrchestratorSettings(
                retriever_address="127.0.0.1:1",
                verifier_address=f"127.0.0.1:{verifier.service.server.port}",
                drafter_addresses=tuple(f"127.0.0.1:{one.service.server.port}" for one in drafters),
                drain_notice_s=0.0,
                drain_grace_s=1.0,
            ),
            lifecycle,
        )
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        stub: rag_pb2_grpc.RagServiceAsyncStub = rag_pb2_grpc.RagServiceStub(channel)
        yield RealMesh(stub, verifier, drafters)


TARGET_ONLY = rag_pb2.ANSWER_POLICY_TARGET_ONLY
JOINT = rag_pb2.ANSWER_POLICY_JOINT
