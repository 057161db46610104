"""Puts a drafter together: server, suffix drafting at once, the engine when it is loaded."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specrag.v1 import drafter_pb2_grpc
from specrag_common.runtime.server import GrpcServer
from specrag_common.speculation.proposals import DraftSource
from specrag_inference.prompts import PromptBuilder
from specrag_serving.engine_host import EngineHost
from specrag_serving.model_files import find_folder, read_model_files

from specrag_drafter.servicer import SERVICE, DrafterServicer, DraftModel

if TYPE_CHECKING:
    from pathlib import Path

    from specrag_common.runtime.lifecycle import Lifecycle

    from specrag_drafter.settings import DrafterSettings

_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningDrafter:
    """A running drafter: its server and its engine process."""

    server: GrpcServer
    engine: EngineHost


async def start_drafter(settings: DrafterSettings, lifecycle: Lifecycle) -> RunningDrafter:
    """Listen at once; draft by suffix as soon as the tokenizer is there, from the model later.

    Health has one flag a source (``specrag.v1.DrafterService/suffix``, ``…/model``) beside the
    service's own, which stands for the default sources. The engine's death later ends the process
    with a non-zero exit code.

    Raises:
        ModelFailure: the model cannot be loaded.
        FailedPrecondition: the address cannot be bound.
    """
    servicer = DrafterServicer()
    server = lifecycle.serve(GrpcServer(settings, services=[SERVICE]))
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, server.grpc)
    for source in DraftSource:
        server.set_ready(get_health_name(source), ready=False)
    await server.start()
    plan = settings.make_plan()
    folder = await asyncio.to_thread(find_folder, plan.model, plan.cache_dir)
    engine = EngineHost(plan, on_death=lifecycle.fail)
    lifecycle.on_close(engine.stop)
    loading = asyncio.create_task(engine.start())
    try:
        await _wait_for_folder(folder, loading)
        servicer.set_model(await asyncio.to_thread(_read_model, settings, folder))
        server.set_ready(get_health_name(DraftSource.SUFFIX))
        server.set_ready(SERVICE, ready=DraftSource.MODEL not in settings.sources)
        ready = await loading
    finally:
        loading.cancel()
    servicer.set_engine(engine, dtype=ready.dtype)
    server.set_ready(get_health_name(DraftSource.MODEL))
    server.set_ready(SERVICE)
    return RunningDrafter(server=server, engine=engine)


def get_health_name(source: DraftSource) -> str:
    """Return the name of one source's health flag."""
    return f"{SERVICE}/{source}"


def _read_model(settings: DrafterSettings, folder: Path) -> DraftModel:
    files = read_model_files(settings.model, folder)
    return DraftModel(
        files=files,
        prompts=PromptBuilder(
            files.tokenizer,
            max_model_len=files.max_model_len,
            instructions=settings.system_prompt,
        ),
        default_sources=settings.sources,
        tp_size=settings.tp_size,
    )


async def _wait_for_folder(folder: Path, loading: asyncio.Future[Any]) -> None:
    """Return once the engine process has converted the model; raise if it failed to."""
    while not await asyncio.to_thread(folder.is_dir):
        if loading.done():
            loading.result()
        await asyncio.sleep(_POLL_S)
