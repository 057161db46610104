"""RetrieverService: decodes requests, calls the domain, encodes what it says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from specrag.v1 import retriever_pb2, retriever_pb2_grpc
from specrag_common.runtime.errors import Capacity

from specrag_retriever.catalogue import CollectionInfo
from specrag_retriever.ingestion import IngestResult, IngestStatus
from specrag_retriever.requests import (
    decode_create,
    decode_delete,
    decode_name,
    decode_search,
    decode_tenant,
)
from specrag_retriever.responses import encode_collection, encode_results, encode_search
from specrag_retriever.searching import require_embedder
from specrag_retriever.upsert_stream import read_documents, read_open

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc

    from specrag_retriever.core import RetrieverCore
    from specrag_retriever.ingestion import SourceDocument
    from specrag_retriever.upsert_stream import StreamItem

    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE_NAME: Final = "specrag.v1.RetrieverService"
"""Full name, for health and reflection."""

MAX_UPSERT_STREAMS: Final = 4
"""Streams ingested at once; each holds up to three documents in memory."""


class RetrieverServicer(retriever_pb2_grpc.RetrieverServiceServicer):
    """Serves the contract of ``retriever.proto``."""

    def __init__(self, core: RetrieverCore, *, default_max_passage_tokens: int) -> None:
        """Serve ``core``; new collections get passages of the given length unless they say."""
        self._core = core
        self._default_max_passage_tokens = default_max_passage_tokens
        self._num_upserts = 0

    async def Search(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.SearchRequest, _context: Context
    ) -> retriever_pb2.SearchResponse:
        """Find passages."""
        query = decode_search(request)
        return encode_search(await self._core.ready().searcher.search(query))

    async def UpsertDocuments(  # noqa: N802 - name given by the contract
        self,
        request_iterator: AsyncIterator[retriever_pb2.UpsertDocumentsRequest],
        _context: Context,
    ) -> retriever_pb2.UpsertDocumentsResponse:
        """Add or replace documents."""
        if self._num_upserts >= MAX_UPSERT_STREAMS:
            raise Capacity(
                f"{MAX_UPSERT_STREAMS} upsert streams are open, the limit", retry_delay_s=2.0
            )
        self._num_upserts += 1
        try:
            return encode_results(await self._ingest_all(aiter(request_iterator)))
        finally:
            self._num_upserts -= 1

    async def DeleteDocuments(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.DeleteDocumentsRequest, _context: Context
    ) -> retriever_pb2.DeleteDocumentsResponse:
        """Delete documents by id."""
        target, ids = decode_delete(request)
        store = self._core.ready().store
        await store.describe_collection(target.collection)
        deleted = await store.delete_documents(target.collection, target.tenant, ids)
        return retriever_pb2.DeleteDocumentsResponse(
            num_deleted_documents=len({one.document_id for one in deleted}),
            num_deleted_passages=sum(one.num_passages for one in deleted),
        )

    async def CreateCollection(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.CreateCollectionRequest, _context: Context
    ) -> retriever_pb2.CreateCollectionResponse:
        """Create a collection for this service's embedder."""
        name, max_passage_tokens = decode_create(request, self._default_max_passage_tokens)
        ready = self._core.ready()
        abilities = await ready.connection.abilities()
        info = CollectionInfo(
            name=name,
            embedder_fingerprint=ready.embedder.fingerprint,
            embedding_dim=ready.embedder.dim,
            max_passage_tokens=max_passage_tokens,
            has_lexical=abilities.has_lexical,
        )
        await ready.store.create_collection(info)
        return retriever_pb2.CreateCollectionResponse(collection=encode_collection(info))

    async def GetCollection(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.GetCollectionRequest, _context: Context
    ) -> retriever_pb2.GetCollectionResponse:
        """Describe a collection."""
        name, tenant = decode_name(request.name), decode_tenant(request.tenant)
        store = self._core.ready().store
        info = await store.describe_collection(name)
        counts = await store.count(name, tenant)
        return retriever_pb2.GetCollectionResponse(collection=encode_collection(info, counts))

    async def ListCollections(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.ListCollectionsRequest, _context: Context
    ) -> retriever_pb2.ListCollectionsResponse:
        """List all collections."""
        tenant = decode_tenant(request.tenant)
        store = self._core.ready().store
        response = retriever_pb2.ListCollectionsResponse()
        for info in await store.list_collections():
            counts = await store.count(info.name, tenant)
            response.collections.append(encode_collection(info, counts))
        return response

    async def DeleteCollection(  # noqa: N802 - name given by the contract
        self, request: retriever_pb2.DeleteCollectionRequest, _context: Context
    ) -> retriever_pb2.DeleteCollectionResponse:
        """Delete a collection."""
        await self._core.ready().store.delete_collection(decode_name(request.name))
        return retriever_pb2.DeleteCollectionResponse()

    async def _ingest_all(
        self, messages: AsyncIterator[retriever_pb2.UpsertDocumentsRequest]
    ) -> list[IngestResult]:
        """Ingest in the order sent, receiving the next document meanwhile."""
        target = await read_open(messages)
        ready = self._core.ready()
        info = await ready.store.describe_collection(target.collection)
        require_embedder(info, ready.embedder)
        incoming: asyncio.Queue[StreamItem | None] = asyncio.Queue(maxsize=1)
        receiving = asyncio.create_task(_receive(messages, incoming))
        results: list[IngestResult] = []
        try:
            while (item := await incoming.get()) is not None:
                if isinstance(item, IngestResult):
                    results.append(item)
                else:
                    results.append(await ready.ingestor.ingest(info, target.tenant, item))
            await receiving
        finally:
            receiving.cancel()
            if any(one.status is IngestStatus.INDEXED for one in results):
                await ready.store.flush(info.name)
        return results


async def _receive(
    messages: AsyncIterator[retriever_pb2.UpsertDocumentsRequest],
    incoming: asyncio.Queue[SourceDocument | IngestResult | None],
) -> None:
    """Put documents into the queue, which bounds how many are held; ``None`` ends it."""
    try:
        async for item in read_documents(messages):
            await incoming.put(item)
    except Exception:
        await incoming.put(None)
        raise
    await incoming.put(None)
