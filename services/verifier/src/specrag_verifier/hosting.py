"""Puts a verifier together: engine process, prompts, server, health."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag.v1 import verifier_pb2_grpc
from specrag_common.runtime.server import GrpcServer
from specrag_inference.prompts import PromptBuilder
from specrag_serving.engine_host import EngineHost
from specrag_serving.model_files import find_folder, read_model_files

from specrag_verifier.servicer import SERVICE, VerifierServicer
from specrag_verifier.verification import TargetModel

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle

    from specrag_verifier.settings import VerifierSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningVerifier:
    """A running verifier: its server and its engine process."""

    server: GrpcServer
    engine: EngineHost


async def start_verifier(settings: VerifierSettings, lifecycle: Lifecycle) -> RunningVerifier:
    """Listen at once, answer UNAVAILABLE while the model loads, then serve.

    The engine's death later ends the process with a non-zero exit code.

    Raises:
        ModelFailure: the model cannot be loaded.
        FailedPrecondition: the address cannot be bound.
    """
    servicer = VerifierServicer()
    server = lifecycle.serve(GrpcServer(settings, services=[SERVICE]))
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    plan = settings.make_plan()
    folder = await asyncio.to_thread(find_folder, plan.model, plan.cache_dir)
    engine = EngineHost(plan, on_death=lifecycle.fail)
    lifecycle.on_close(engine.stop)
    ready = await engine.start()
    files = await asyncio.to_thread(read_model_files, plan.model, folder)
    prompts = await asyncio.to_thread(
        PromptBuilder,
        files.tokenizer,
        max_model_len=files.max_model_len,
        instructions=settings.system_prompt,
    )
    servicer.set_target(TargetModel(files=files, prompts=prompts, engine=engine, dtype=ready.dtype))
    server.set_ready(SERVICE)
    return RunningVerifier(server=server, engine=engine)
