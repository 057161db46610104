"""Bytes of a file to extracted text, or a named reason why there is none."""

from specrag_retriever.documents.model import (
    Block,
    BlockKind,
    DocumentSkippedError,
    ExtractedDocument,
    SkipReason,
)
from specrag_retriever.documents.parsing import (
    MAX_DOCUMENT_BYTES,
    extract_document,
    title_from_uri,
    too_large,
)

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "Block",
    "BlockKind",
    "DocumentSkippedError",
    "ExtractedDocument",
    "SkipReason",
    "extract_document",
    "title_from_uri",
    "too_large",
]
