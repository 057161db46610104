"""Puts an orchestrator together: channels, drafters, session store, server, health."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from specrag.v1 import rag_pb2_grpc, retriever_pb2_grpc, verifier_pb2_grpc
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.server import GrpcServer
from specrag_common.sessions.lease import SessionLeases
from specrag_common.sessions.model import SessionLimits
from specrag_common.sessions.redis_client import open_redis
from specrag_common.sessions.turn_log import RedisTurnLog

from specrag_orchestrator.answering.resources import DraftTuning, Resources, SessionStore
from specrag_orchestrator.answering.service import AnswerService
from specrag_orchestrator.answering.waiting import WaitBounds
from specrag_orchestrator.drafters import DrafterPool
from specrag_orchestrator.retrieval import PassageSearch
from specrag_orchestrator.servicer import SERVICE, RagServicer
from specrag_orchestrator.target_model import TargetModels

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle

    from specrag_orchestrator.settings import OrchestratorSettings

_SECONDS_A_DAY: Final = 86_400


async def start_orchestrator(settings: OrchestratorSettings, lifecycle: Lifecycle) -> GrpcServer:
    """Open every connection and serve; what was opened is closed with ``lifecycle``."""
    sessions = _open_sessions(lifecycle, settings)
    answers = AnswerService(
        _open_resources(lifecycle, settings, sessions),
        max_concurrent_answers=settings.max_concurrent_answers,
        answer_timeout_s=settings.answer_timeout_s,
    )
    lifecycle.on_close(answers.close)
    server = lifecycle.serve(GrpcServer(settings, services=[SERVICE]))
    rag_pb2_grpc.add_RagServiceServicer_to_server(RagServicer(answers, sessions), server.grpc)
    await server.start()
    server.set_ready(SERVICE)
    return server


def _open_resources(
    lifecycle: Lifecycle, settings: OrchestratorSettings, sessions: SessionStore | None
) -> Resources:
    retriever_channel = open_channel(
        settings.retriever_address,
        idempotent_methods=["specrag.v1.RetrieverService/Search"],
    )
    lifecycle.on_close(retriever_channel.close)
    verifier_channel = open_channel(
        settings.verifier_address,
        idempotent_methods=["specrag.v1.VerifierService/GetModelInfo"],
    )
    lifecycle.on_close(verifier_channel.close)
    drafters = DrafterPool(settings.drafter_addresses)
    lifecycle.on_close(drafters.close)
    drafters.start()
    verifier: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(
        verifier_channel
    )
    retriever: retriever_pb2_grpc.RetrieverServiceAsyncStub = (
        retriever_pb2_grpc.RetrieverServiceStub(retriever_channel)
    )
    return Resources(
        search=PassageSearch(
            retriever,
            num_passages=settings.num_passages,
            timeout_s=settings.retrieval_timeout_s,
        ),
        verifier=verifier,
        target_models=TargetModels(verifier),
        drafters=drafters,
        sessions=sessions,
        tuning=_build_tuning(settings),
        clock=time.monotonic,
    )


def _open_sessions(lifecycle: Lifecycle, settings: OrchestratorSettings) -> SessionStore | None:
    if not settings.redis_url:
        return None
    client = open_redis(settings.redis_url)
    lifecycle.on_close(client.aclose)
    limits = SessionLimits(ttl_s=int(settings.session_ttl_days * _SECONDS_A_DAY))
    return SessionStore(turn_log=RedisTurnLog(client, limits=limits), leases=SessionLeases(client))


def _build_tuning(settings: OrchestratorSettings) -> DraftTuning:
    return DraftTuning(
        max_gamma=settings.max_gamma,
        max_draft_tokens=settings.max_draft_tokens,
        waits=WaitBounds(
            first_s=settings.first_draft_wait_ms / 1e3, max_s=settings.max_draft_wait_ms / 1e3
        ),
        connect_s=settings.drafter_connect_ms / 1e3,
    )
