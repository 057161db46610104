"""From a file's bytes to searchable passages: parse, split, embed, store."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span

from specrag_retriever.chunking import split_into_passages, split_into_windows
from specrag_retriever.documents import DocumentSkippedError, extract_document, title_from_uri
from specrag_retriever.embedder import Urgency
from specrag_retriever.rows import DocumentIdentity, IndexedDocument

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Executor

    from tokenizers import Tokenizer

    from specrag_retriever.catalogue import CollectionInfo
    from specrag_retriever.chunking import TextPassage, Window
    from specrag_retriever.embedder import Embedder
    from specrag_retriever.store import MilvusStore

_SPLIT_FORMAT: Final = "1"
"""Raised when the same bytes are parsed or split differently: documents are then stored anew."""

_MAX_FOUND_TITLE_CHARS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceDocument:
    """A document as sent."""

    document_id: str
    uri: str
    title: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    data: bytes


class IngestStatus(StrEnum):
    """What became of a document."""

    INDEXED = "indexed"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestResult:
    """Outcome for one document; ``reason`` is set when it was skipped."""

    document_id: str
    status: IngestStatus
    num_passages: int = 0
    reason: str = ""
    detail: str = ""

    @classmethod
    def skipped(cls, document_id: str, skip: DocumentSkippedError) -> IngestResult:
        """Return the outcome of a skipped document."""
        return cls(
            document_id=document_id,
            status=IngestStatus.SKIPPED,
            reason=skip.reason.value,
            detail=skip.detail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitDocument:
    passages: Sequence[TextPassage]
    windows: Sequence[Sequence[Window]]
    title: str
    notes: tuple[str, ...]


class Ingestor:
    """Makes documents searchable; parsing and splitting run in ``executor``."""

    def __init__(
        self,
        store: MilvusStore,
        embedder: Embedder,
        passage_tokenizer: Tokenizer,
        executor: Executor,
    ) -> None:
        """Write to ``store``; ``passage_tokenizer`` counts the tokens of passages."""
        self._store = store
        self._embedder = embedder
        self._passage_tokenizer = passage_tokenizer
        self._executor = executor

    async def ingest(
        self, info: CollectionInfo, tenant: str, source: SourceDocument
    ) -> IngestResult:
        """Store a document in place of its former version.

        A document that cannot be read is reported as skipped; its former version stays.
        """
        with span(SpanName.INGEST, {SpanKey.COLLECTION: info.name}) as step:
            try:
                result = await self._ingest(info, tenant, source)
            except DocumentSkippedError as skip:
                result = IngestResult.skipped(source.document_id, skip)
            step.set_attribute(SpanKey.NUM_PASSAGES, result.num_passages)
            return result

    async def _ingest(
        self, info: CollectionInfo, tenant: str, source: SourceDocument
    ) -> IngestResult:
        identity = DocumentIdentity(
            tenant=tenant,
            document_id=source.document_id,
            title=source.title,
            uri=source.uri,
            metadata=source.metadata,
            content_digest=_digest(source.data, info.max_passage_tokens),
        )
        stored = await self._store.find_versions(info.name, tenant, [source.document_id])
        if [one.version for one in stored] == [identity.version]:
            return IngestResult(
                document_id=source.document_id,
                status=IngestStatus.UNCHANGED,
                num_passages=stored[0].num_passages,
            )
        loop = asyncio.get_running_loop()
        split = await loop.run_in_executor(
            self._executor, self._split, source, info.max_passage_tokens
        )
        texts = [window.embedder_text for windows in split.windows for window in windows]
        vectors = await self._embedder.embed(texts, Urgency.DOCUMENT)
        document = IndexedDocument(
            identity=identity,
            passages=split.passages,
            windows=split.windows,
            vectors=vectors,
            shown_title=split.title,
        )
        await self._store.replace_document(info, document)
        return IngestResult(
            document_id=source.document_id,
            status=IngestStatus.INDEXED,
            num_passages=len(split.passages),
            detail="; ".join(split.notes),
        )

    def _split(self, source: SourceDocument, max_passage_tokens: int) -> _SplitDocument:
        """Parse and split; blocking."""
        document = extract_document(source.data, source.uri)
        fallback = title_from_uri(source.uri) or source.document_id
        title = source.title or (document.title or fallback)[:_MAX_FOUND_TITLE_CHARS]
        passages = split_into_passages(document, self._passage_tokenizer, max_passage_tokens)
        embedder = self._embedder
        windows = [
            split_into_windows(one, title, embedder.tokenizer, embedder.max_window_tokens)
            for one in passages
        ]
        return _SplitDocument(passages=passages, windows=windows, title=title, notes=document.notes)


def _digest(data: bytes, max_passage_tokens: int) -> bytes:
    digest = hashlib.sha256(f"{_SPLIT_FORMAT};{max_passage_tokens};".encode())
    digest.update(data)
    return digest.digest()
