"""Sending documents in batches, so that progress shows and a lost connection costs little."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.errors import SpecragError

from specrag_client.discovery import SkippedFile
from specrag_client.documents import Document, DocumentStatus

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from specrag_client.discovery import Discovery, FoundFile
    from specrag_client.documents import DocumentResult, DocumentsClient

_BATCH_FILES: Final = 16
_BATCH_BYTES: Final = 2 * 1024 * 1024
_ATTEMPTS: Final = 4
_FIRST_BACK_OFF_S: Final = 0.5


@dataclass(slots=True)
class IngestionReport:
    """What became of everything found so far.

    Attributes:
        num_indexed: documents added or replaced.
        num_unchanged: documents whose content was there already.
        num_passages: passages of the indexed documents.
        num_bytes: bytes of all documents sent.
        skipped: what was left out, here or by the service, with the reason.
        repaired: documents that were indexed though damaged: id and what was repaired.
    """

    num_indexed: int = 0
    num_unchanged: int = 0
    num_passages: int = 0
    num_bytes: int = 0
    skipped: list[SkippedFile] = field(default_factory=list)
    repaired: list[tuple[str, str]] = field(default_factory=list)

    @property
    def num_documents(self) -> int:
        """All that is accounted for."""
        return self.num_indexed + self.num_unchanged + len(self.skipped)

    def add(self, result: DocumentResult) -> None:
        """Count one outcome."""
        match result.status:
            case DocumentStatus.INDEXED:
                self.num_indexed += 1
                self.num_passages += result.num_passages
            case DocumentStatus.UNCHANGED:
                self.num_unchanged += 1
            case _:
                self.skipped.append(
                    SkippedFile(
                        document_id=result.document_id,
                        reason=result.reason or "UNKNOWN",
                        detail=result.detail,
                    )
                )
                return
        if result.detail:
            self.repaired.append((result.document_id, result.detail))


async def ingest_files(
    client: DocumentsClient, discovery: Discovery, *, collection: str, tenant: str = ""
) -> AsyncIterator[IngestionReport]:
    """Send all files found; yield the same growing report after each batch, and at the start.

    Batches that fail for a reason that may pass are sent again: the same id replaces a document.

    Raises:
        SpecragError: the service refused or stays away; the report says how far it came.
    """
    report = IngestionReport(skipped=list(discovery.skipped))
    yield report
    for batch in _batches(discovery.files):
        documents = [one for one in (_read(file, report) for file in batch) if one is not None]
        if documents:
            for result in await _send(client, documents, collection=collection, tenant=tenant):
                report.add(result)
        report.num_bytes += sum(len(one.data) for one in documents)
        yield report


def _batches(files: Sequence[FoundFile]) -> Iterator[list[FoundFile]]:
    batch: list[FoundFile] = []
    num_bytes = 0
    for file in files:
        full = len(batch) == _BATCH_FILES or num_bytes + file.size_bytes > _BATCH_BYTES
        if batch and full:
            yield batch
            batch, num_bytes = [], 0
        batch.append(file)
        num_bytes += file.size_bytes
    if batch:
        yield batch


def _read(file: FoundFile, report: IngestionReport) -> Document | None:
    try:
        data = file.path.read_bytes()
    except OSError as exc:
        report.skipped.append(
            SkippedFile(
                document_id=file.document_id,
                reason="UNREADABLE",
                detail=exc.strerror or str(exc),
            )
        )
        return None
    return Document(document_id=file.document_id, uri=file.document_id, data=data)


async def _send(
    client: DocumentsClient, documents: Sequence[Document], *, collection: str, tenant: str
) -> tuple[DocumentResult, ...]:
    back_off_s = _FIRST_BACK_OFF_S
    for attempt in range(_ATTEMPTS):
        try:
            return await client.upsert(documents, collection=collection, tenant=tenant)
        except SpecragError as exc:
            if not exc.retryable or attempt == _ATTEMPTS - 1:
                raise
            await asyncio.sleep(exc.retry_delay_s or back_off_s)
            back_off_s *= 2
    raise AssertionError("the last attempt returns or raises")
