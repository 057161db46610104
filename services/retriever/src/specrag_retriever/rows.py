"""A document as rows: what is written into Milvus, in batches bounded by bytes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from specrag_retriever.lexical import lexical_text
from specrag_retriever.milvus_schema import DENSE_FIELD, LEXICAL_TEXT_FIELD, MAX_VARCHAR_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from specrag_retriever.chunking import TextPassage, Window

MAX_BATCH_BYTES: Final = 8 * 1024 * 1024
"""Rows of one insert; servers take 64 MiB, some 4 MiB of them for the whole message."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentIdentity:
    """Whose document it is, and everything that makes a version differ from another.

    Attributes:
        tenant: owner.
        document_id: stable id.
        title: as given or found.
        uri: as given.
        metadata: as given.
        content_digest: of the bytes and of how they are split.
    """

    tenant: str
    document_id: str
    title: str
    uri: str
    metadata: Mapping[str, str] = field(default_factory=dict)
    content_digest: bytes

    @property
    def version(self) -> str:
        """Identify this version of the document: equal content and description, equal version."""
        digest = hashlib.sha256()
        parts = [self.tenant, self.document_id, self.title, self.uri]
        parts += [part for pair in sorted(self.metadata.items()) for part in pair]
        for part in parts:
            encoded = part.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        digest.update(self.content_digest)
        return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedDocument:
    """A document cut and embedded.

    Attributes:
        identity: what it is.
        passages: in order.
        windows: one list a passage, none empty.
        vectors: [num_windows, dim] float32, windows of all passages in order.
        shown_title: title of the passages, never empty.
    """

    identity: DocumentIdentity
    passages: Sequence[TextPassage]
    windows: Sequence[Sequence[Window]]
    vectors: NDArray[np.float32]
    shown_title: str


def build_rows(document: IndexedDocument, *, has_lexical: bool) -> Iterator[Row]:
    """Yield the rows, last one first: row 0, which marks the document complete, comes last."""
    version = document.identity.version
    num_rows = len(document.vectors)
    row_idx = num_rows
    for passage_idx in reversed(range(len(document.passages))):
        windows = document.windows[passage_idx]
        for window_idx in reversed(range(len(windows))):
            row_idx -= 1
            yield {
                **_document_fields(document, version, num_rows),
                **_passage_fields(document.passages[passage_idx], version, passage_idx),
                "row_id": f"{version}-{row_idx}",
                "row_idx": row_idx,
                "passage_idx": passage_idx,
                "window_idx": window_idx,
                DENSE_FIELD: document.vectors[row_idx],
                **_lexical_fields(windows[window_idx], has_lexical=has_lexical),
            }
    assert row_idx == 0, "one vector a window"


def batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Group rows so that no batch exceeds MAX_BATCH_BYTES by more than a row."""
    batch: list[Row] = []
    num_bytes = 0
    for row in rows:
        batch.append(row)
        num_bytes += _row_bytes(row)
        if num_bytes >= MAX_BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _document_fields(document: IndexedDocument, version: str, num_rows: int) -> Row:
    identity = document.identity
    return {
        "tenant": identity.tenant,
        "document_id": identity.document_id,
        "version": version,
        "title": document.shown_title,
        "uri": identity.uri,
        "metadata": dict(identity.metadata),
        "num_passages": len(document.passages),
        "num_rows": num_rows,
    }


def _passage_fields(passage: TextPassage, version: str, passage_idx: int) -> Row:
    return {
        "chunk_id": f"{version}-{passage_idx}",
        "text": passage.text,
        "start_char": passage.start,
        "end_char": passage.end,
    }


def _lexical_fields(window: Window, *, has_lexical: bool) -> Row:
    if not has_lexical:
        return {}
    text = lexical_text(f"{window.context}\n{window.text}").encode()[:MAX_VARCHAR_BYTES]
    return {LEXICAL_TEXT_FIELD: text.decode(errors="ignore")}


def _row_bytes(row: Row) -> int:
    texts = sum(len(value.encode()) for value in row.values() if isinstance(value, str))
    metadata = sum(len(key) + len(value.encode()) for key, value in row["metadata"].items())
    return texts + metadata + int(row[DENSE_FIELD].nbytes) + 128
