"""A Milvus Lite server for the session, and a retriever around it for each test."""

from __future__ import annotations

import contextlib
import shutil
from typing import TYPE_CHECKING

import grpc
import pytest
from specrag.v1.retriever_pb2_grpc import (
    RetrieverServiceStub,
    add_RetrieverServiceServicer_to_server,
)
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.settings import ServiceSettings
from specrag_retriever.core import RetrieverCore
from specrag_retriever.embedding import load_counting_tokenizer
from specrag_retriever.milvus_connection import MilvusConnection
from specrag_retriever.servicer import SERVICE_NAME, RetrieverServicer

from tests.retriever.serving import (
    EMBEDDER_REFERENCE,
    LiteServer,
    Retriever,
    StartRetriever,
    WordEmbedder,
    free_port,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from specrag.v1.retriever_pb2_grpc import RetrieverServiceAsyncStub
    from specrag_retriever.embedder import Embedder
    from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiteServer]:
    """The session's Milvus Lite; tests use collections of their own."""
    server = LiteServer(tmp_path_factory.mktemp("milvus"), free_port())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def own_lite(tmp_path: Path) -> Iterator[LiteServer]:
    """A Milvus Lite that the test may kill; not started yet."""
    server = LiteServer(tmp_path / "milvus", free_port())
    yield server
    if server.process is not None and server.process.poll() is None:
        server.kill()
    shutil.rmtree(server.data_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The bundled embedder's tokenizer, which counts passage tokens too."""
    return load_counting_tokenizer(EMBEDDER_REFERENCE, tmp_path_factory.mktemp("models"))


@pytest.fixture
async def start_retriever(tokenizer: Tokenizer) -> AsyncIterator[StartRetriever]:
    """Start a service in this process: ``await start_retriever(uri, fingerprint=…)``."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            uri: str, *, fingerprint: str = "words-1", embedder: Embedder | None = None
        ) -> Retriever:
            server = GrpcServer(ServiceSettings(drain_notice_s=0), services=[SERVICE_NAME])
            core = RetrieverCore(
                MilvusConnection(uri), lambda ready: server.set_ready(SERVICE_NAME, ready=ready)
            )
            stack.push_async_callback(core.close)
            core.assemble(embedder or WordEmbedder(tokenizer, fingerprint), tokenizer)
            servicer = RetrieverServicer(core, default_max_passage_tokens=384)
            add_RetrieverServiceServicer_to_server(servicer, server.grpc)
            await stack.enter_async_context(server)
            channel = await stack.enter_async_context(
                grpc.aio.insecure_channel(f"127.0.0.1:{server.port}")
            )
            stub: RetrieverServiceAsyncStub = RetrieverServiceStub(channel)
            return Retriever(stub, core, server, channel)

        yield start


@pytest.fixture
async def retriever(lite: LiteServer, start_retriever: StartRetriever) -> Retriever:
    """A service on the session's Milvus Lite with a fresh collection name."""
    return await start_retriever(lite.uri)
