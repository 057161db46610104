"""Documents from Python: collections, adding, deleting and searching."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from specrag.v1 import retriever_pb2, retriever_pb2_grpc
from specrag_common.runtime.client_calls import cancelling
from specrag_common.runtime.errors import AlreadyExists, NotFound

from specrag_client.connection import ServiceConnection
from specrag_client.convert import to_passage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

    from specrag_client.events import Passage

MAX_DOCUMENT_BYTES: Final = 32 * 1024 * 1024
"""Largest document the retriever takes."""

MAX_DOCUMENT_ID_CHARS: Final = 512
"""Longest document id, in code points."""

_CHUNK_BYTES: Final = 256 * 1024
_UPSERT_TIMEOUT_S: Final = 900.0
_IDEMPOTENT: Final = tuple(
    f"specrag.v1.RetrieverService/{method}"
    for method in ("Search", "GetCollection", "ListCollections", "DeleteDocuments")
)


class DocumentStatus(StrEnum):
    """What became of a document."""

    INDEXED = "indexed"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"
    UNSPECIFIED = "unspecified"


_STATUSES: Final[Mapping[int, DocumentStatus]] = {
    retriever_pb2.DOCUMENT_STATUS_INDEXED: DocumentStatus.INDEXED,
    retriever_pb2.DOCUMENT_STATUS_UNCHANGED: DocumentStatus.UNCHANGED,
    retriever_pb2.DOCUMENT_STATUS_SKIPPED: DocumentStatus.SKIPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document to add.

    Attributes:
        document_id: stable id; the same id replaces the document.
        uri: file name or path; its ending decides the parser.
        data: the content, at most 32 MiB.
        title: empty: found in the document, or the file name.
        metadata: at most 32 entries.
    """

    document_id: str
    uri: str
    data: bytes
    title: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentResult:
    """What became of one document: with why it was skipped, or what damage was repaired."""

    document_id: str
    status: DocumentStatus
    num_passages: int
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A collection; the counts are those of the tenant asked about."""

    name: str
    embedder_fingerprint: str
    embedding_dim: int
    max_passage_tokens: int
    num_documents: int
    num_passages: int


class DocumentsClient(ServiceConnection):
    """A connection to one retriever; use it as an async context manager.

    Every method raises :class:`specrag_common.runtime.errors.SpecragError` when the service
    refuses or fails.
    """

    def __init__(self, endpoint: str) -> None:
        """Open a channel to ``HOST:PORT``; it connects on the first call.

        Raises:
            AddressError: the endpoint is no ``HOST:PORT``.
        """
        super().__init__(endpoint, _IDEMPOTENT)
        self._stub = retriever_pb2_grpc.RetrieverServiceStub(self._channel)

    async def search(
        self, query: str, *, collection: str, tenant: str = "", top_k: int | None = None
    ) -> tuple[Passage, ...]:
        """Return the passages nearest to a query, best first."""
        response = await self._stub.Search(
            retriever_pb2.SearchRequest(
                collection=collection, tenant=tenant, query=query, top_k=top_k
            )
        )
        return tuple(map(to_passage, response.passages))

    async def upsert(
        self, documents: Iterable[Document], *, collection: str, tenant: str = ""
    ) -> tuple[DocumentResult, ...]:
        """Add or replace documents in one stream; results come in the order given."""
        requests = _upsert_requests(documents, collection=collection, tenant=tenant)
        with cancelling(self._stub.UpsertDocuments(requests, timeout=_UPSERT_TIMEOUT_S)) as call:
            response = await call
        return tuple(map(_to_result, response.results))

    async def delete(
        self, document_ids: Sequence[str], *, collection: str, tenant: str = ""
    ) -> int:
        """Delete documents; return how many were there."""
        response = await self._stub.DeleteDocuments(
            retriever_pb2.DeleteDocumentsRequest(
                collection=collection, tenant=tenant, document_ids=document_ids
            )
        )
        return response.num_deleted_documents

    async def get_collection(self, name: str, *, tenant: str = "") -> Collection:
        """Describe a collection."""
        response = await self._stub.GetCollection(
            retriever_pb2.GetCollectionRequest(name=name, tenant=tenant)
        )
        return _to_collection(response.collection)

    async def list_collections(self, *, tenant: str = "") -> tuple[Collection, ...]:
        """Describe all collections, by name."""
        response = await self._stub.ListCollections(
            retriever_pb2.ListCollectionsRequest(tenant=tenant)
        )
        return tuple(map(_to_collection, response.collections))

    async def ensure_collection(self, name: str) -> bool:
        """Create the collection unless there is one; tell whether it was created."""
        try:
            await self._stub.GetCollection(retriever_pb2.GetCollectionRequest(name=name))
        except NotFound:
            pass
        else:
            return False
        try:
            await self._stub.CreateCollection(retriever_pb2.CreateCollectionRequest(name=name))
        except AlreadyExists:
            return False
        return True


async def _upsert_requests(
    documents: Iterable[Document], *, collection: str, tenant: str
) -> AsyncIterator[retriever_pb2.UpsertDocumentsRequest]:
    yield retriever_pb2.UpsertDocumentsRequest(
        open=retriever_pb2.OpenUpsert(collection=collection, tenant=tenant)
    )
    for document in documents:
        yield retriever_pb2.UpsertDocumentsRequest(
            start=retriever_pb2.DocumentStart(
                document_id=document.document_id,
                uri=document.uri,
                title=document.title,
                metadata=document.metadata,
                size_bytes=len(document.data),
            )
        )
        for begin in range(0, len(document.data), _CHUNK_BYTES):
            yield retriever_pb2.UpsertDocumentsRequest(
                data=document.data[begin : begin + _CHUNK_BYTES]
            )


def _to_result(wire: retriever_pb2.DocumentResult) -> DocumentResult:
    return DocumentResult(
        document_id=wire.document_id,
        status=_STATUSES.get(wire.status, DocumentStatus.UNSPECIFIED),
        num_passages=wire.num_passages,
        reason=wire.reason,
        detail=wire.detail,
    )


def _to_collection(wire: retriever_pb2.Collection) -> Collection:
    return Collection(
        name=wire.name,
        embedder_fingerprint=wire.embedder_fingerprint,
        embedding_dim=wire.embedding_dim,
        max_passage_tokens=wire.max_passage_tokens,
        num_documents=wire.num_documents,
        num_passages=wire.num_passages,
    )
