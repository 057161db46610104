"""Puts the service together: server first, models beside it, then the watch over Milvus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from specrag.v1.retriever_pb2_grpc import add_RetrieverServiceServicer_to_server
from specrag_common.runtime.server import GrpcServer

from specrag_retriever.core import RetrieverCore
from specrag_retriever.milvus_connection import MilvusConnection
from specrag_retriever.servicer import SERVICE_NAME, RetrieverServicer

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle

    from specrag_retriever.settings import RetrieverSettings


async def start_retriever(settings: RetrieverSettings, lifecycle: Lifecycle) -> None:
    """Return once the server listens and the models are loaded.

    Health of the service is SERVING while Milvus answers; it need not be there at the start.
    """
    # The client library logs every failed call with its stack; ours are logged once, in words.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    connection = MilvusConnection(settings.milvus_uri, settings.milvus_token.get_secret_value())
    server = GrpcServer(settings, services=[SERVICE_NAME])
    core = RetrieverCore(
        connection, on_ready=lambda ready: server.set_ready(SERVICE_NAME, ready=ready)
    )
    lifecycle.on_close(core.close)
    servicer = RetrieverServicer(core, default_max_passage_tokens=settings.max_passage_tokens)
    add_RetrieverServiceServicer_to_server(servicer, server.grpc)
    await lifecycle.serve(server).start()
    await core.load(
        embedder=settings.embedder,
        passage_tokenizer=settings.passage_tokenizer,
        cache_dir=settings.model_cache_dir.expanduser(),
        num_threads=settings.num_threads,
    )
    watch = asyncio.create_task(core.watch_milvus())
    lifecycle.on_close(lambda: _stop(watch))


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
