"""The message order of an upsert stream: open, then for each document its start and its bytes.

A document is handed on once its announced bytes are there. At most one is held here, bounded by
MAX_DOCUMENT_BYTES; the bytes of larger ones are dropped as they come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specrag_common.runtime.errors import InvalidRequest

from specrag_retriever.documents import MAX_DOCUMENT_BYTES, too_large
from specrag_retriever.ingestion import IngestResult, SourceDocument
from specrag_retriever.requests import decode_open, decode_start

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from specrag.v1 import retriever_pb2

    from specrag_retriever.requests import DocumentDescription, UpsertTarget

MAX_DATA_BYTES: Final = 512 * 1024
MAX_DOCUMENTS: Final = 1000
"""More documents need further streams: their results would not fit into one response."""

StreamItem = SourceDocument | IngestResult
"""A document to ingest, or the result of one that was refused while it came in."""


async def read_open(
    messages: AsyncIterator[retriever_pb2.UpsertDocumentsRequest],
) -> UpsertTarget:
    """Return where documents go: the first message of the stream.

    Raises:
        InvalidRequest: the stream is empty or begins otherwise.
    """
    async for message in messages:
        if message.WhichOneof("message") != "open":
            raise InvalidRequest("open", "must be the first message of the stream")
        return decode_open(message.open)
    raise InvalidRequest("open", "the stream ended without a message")


async def read_documents(
    messages: AsyncIterator[retriever_pb2.UpsertDocumentsRequest],
) -> AsyncIterator[StreamItem]:
    """Yield documents in the order sent.

    Raises:
        InvalidRequest: the messages do not follow the order, or the bytes do not add up.
    """
    current: _Incoming | None = None
    num_documents = 0
    async for message in messages:
        kind = message.WhichOneof("message")
        if kind == "start":
            if current is not None:
                raise current.incomplete()
            num_documents += 1
            if num_documents > MAX_DOCUMENTS:
                raise InvalidRequest(
                    "start", f"more than {MAX_DOCUMENTS} documents in a stream; open another one"
                )
            current = _Incoming(decode_start(message.start))
        elif kind == "data":
            if current is None:
                raise InvalidRequest("data", "comes before the start of a document")
            current.add(message.data)
        else:
            raise InvalidRequest("message", f"{kind or 'an empty message'} is not expected here")
        if current.is_complete:
            yield current.finish()
            current = None
    if current is not None:
        raise current.incomplete()


class _Incoming:
    """A document whose bytes are coming in."""

    def __init__(self, description: DocumentDescription) -> None:
        self._description = description
        self._data = bytearray()
        self._num_received = 0

    @property
    def is_complete(self) -> bool:
        """Whether all announced bytes came."""
        return self._num_received == self._description.size_bytes

    def add(self, data: bytes) -> None:
        """Take the next bytes; those of a document over the limit are dropped."""
        if len(data) > MAX_DATA_BYTES:
            raise InvalidRequest("data", f"size_bytes={len(data)} exceeds {MAX_DATA_BYTES}")
        self._num_received += len(data)
        announced = self._description.size_bytes
        if self._num_received > announced:
            raise InvalidRequest("data", f"more bytes than start.size_bytes={announced} announced")
        if announced <= MAX_DOCUMENT_BYTES:
            self._data += data

    def finish(self) -> StreamItem:
        """Return the document, or its result if it was over the limit."""
        what = self._description
        if what.size_bytes > MAX_DOCUMENT_BYTES:
            return IngestResult.skipped(what.document_id, too_large(what.size_bytes))
        return SourceDocument(
            document_id=what.document_id,
            uri=what.uri,
            title=what.title,
            metadata=what.metadata,
            data=bytes(self._data),
        )

    def incomplete(self) -> InvalidRequest:
        """Return the error of a document that was broken off."""
        what = self._description
        return InvalidRequest(
            "data",
            f"{self._num_received} of {what.size_bytes} bytes came for {what.document_id[:80]!r}",
        )
