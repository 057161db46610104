"""Chooses the parser of a document by its ending and its bytes."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from specrag_retriever.documents.decoding import decode, decode_html
from specrag_retriever.documents.html import parse_html
from specrag_retriever.documents.markdown import parse_markdown
from specrag_retriever.documents.model import DocumentSkippedError, ExtractedDocument, SkipReason
from specrag_retriever.documents.pdf import parse_pdf
from specrag_retriever.documents.plain_text import parse_plain_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_retriever.documents.decoding import DecodedText

MAX_DOCUMENT_BYTES: Final = 32 * 1024 * 1024
"""Larger documents are skipped as TOO_LARGE."""

_MARKDOWN: Final = frozenset({".md", ".markdown", ".mdown", ".mkd"})
_HTML: Final = frozenset({".html", ".htm", ".xhtml"})
_PLAIN: Final = frozenset({"", ".txt", ".text", ".log", ".rst", ".csv", ".tsv"})
_PDF_MARK: Final = b"%PDF-"
_PDF_MARK_WITHIN: Final = 1024


def extract_document(data: bytes, uri: str) -> ExtractedDocument:
    """Return the searchable text of a document.

    Runs for milliseconds to minutes without yielding: call it in a thread.

    Args:
        data: the whole file.
        uri: its name or address; the ending decides the parser, the bytes have the last word.

    Raises:
        DocumentSkippedError: with the reason to report.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise too_large(len(data))
    if not data.strip(b" \t\r\n\f\v\x00"):
        raise DocumentSkippedError(SkipReason.EMPTY, "the document holds nothing but white space")
    document = _parse(data, _ending_of(uri))
    if not document.text:
        raise DocumentSkippedError(SkipReason.EMPTY, "no visible text was found")
    return document


def too_large(size_bytes: int) -> DocumentSkippedError:
    """Return the skip of a document over the limit."""
    return DocumentSkippedError(
        SkipReason.TOO_LARGE,
        f"size_bytes={size_bytes} exceeds {MAX_DOCUMENT_BYTES}; split the document",
    )


def title_from_uri(uri: str) -> str:
    """Return the file name of a path or address, to stand in for a title."""
    return PurePosixPath(_path_of(uri)).name or uri


def _parse(data: bytes, ending: str) -> ExtractedDocument:
    is_pdf = _PDF_MARK in data[:_PDF_MARK_WITHIN]
    if is_pdf:
        return parse_pdf(data)
    if ending == ".pdf":
        return _parse_text(data, _MISNAMED, parse_plain_text)
    if ending in _MARKDOWN:
        return _parse_text(data, "", parse_markdown)
    if ending in _HTML:
        return _parse_text(data, "", parse_html, decode_html)
    if ending in _PLAIN:
        return _parse_text(data, "", parse_plain_text)
    return _parse_unknown(data, ending)


_MISNAMED: Final = "named .pdf but not a PDF; read as plain text"


def _parse_text(
    data: bytes,
    note: str,
    parse: Callable[[str, tuple[str, ...]], ExtractedDocument],
    decoder: Callable[[bytes], DecodedText] = decode,
) -> ExtractedDocument:
    try:
        decoded = decoder(data)
    except DocumentSkippedError as skipped:
        if note:
            raise DocumentSkippedError(SkipReason.BROKEN, "named .pdf but not a PDF") from skipped
        raise
    return parse(decoded.text, ((note,) if note else ()) + decoded.notes)


def _parse_unknown(data: bytes, ending: str) -> ExtractedDocument:
    try:
        decoded = decode(data)
    except DocumentSkippedError as skipped:
        raise DocumentSkippedError(
            SkipReason.UNSUPPORTED, f"no parser for '{ending}' and {skipped.detail}"
        ) from skipped
    return parse_plain_text(decoded.text, decoded.notes)


def _ending_of(uri: str) -> str:
    return PurePosixPath(_path_of(uri)).suffix.lower()


def _path_of(uri: str) -> str:
    """Return the path of an address without its query; a plain file name is taken as it is."""
    return urlsplit(uri).path if "://" in uri else uri.replace("\\", "/")
