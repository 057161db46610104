"""PDF: the text layer, page by page.

Ligatures are spelt out and words hyphenated at a line end are joined, because neither would be
found by a search. Pages without text are counted; a PDF of pictures only is NO_TEXT.
"""

from __future__ import annotations

import io
import logging
import re
from typing import Final

from pypdf import PdfReader
from pypdf.errors import DependencyError, FileNotDecryptedError

from specrag_retriever.documents.builder import TextBuilder
from specrag_retriever.documents.model import (
    BlockKind,
    DocumentSkippedError,
    ExtractedDocument,
    SkipReason,
)

_LIGATURES: Final = {
    0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl", 0xFB05: "st",
    0xFB06: "st",
}  # fmt: skip
_HYPHENATED: Final = re.compile(r"(?<=[^\W\d_])[-\u2010\u00ad]\n(?=[a-z\u00df-\u00ff])")
_NO_TITLES: Final = frozenset({"untitled", "untitled document", "title", "document"})
_BLANK_LINES: Final = re.compile(r"\n\s*\n")

logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def parse_pdf(data: bytes, notes: tuple[str, ...] = ()) -> ExtractedDocument:
    """Return the text of a PDF.

    Raises:
        DocumentSkippedError: LOCKED, BROKEN or NO_TEXT.
    """
    try:
        reader = PdfReader(io.BytesIO(data), strict=False)
        _unlock(reader)
        pages, num_broken = _read_pages(reader)
        title = _title(reader)
    except DocumentSkippedError:
        raise
    except (FileNotDecryptedError, DependencyError) as exc:
        raise DocumentSkippedError(SkipReason.LOCKED, "the PDF is encrypted") from exc
    except Exception as exc:  # a damaged file breaks the reader in any way
        detail = " ".join(str(exc).split())[:200] or type(exc).__name__
        raise DocumentSkippedError(SkipReason.BROKEN, f"the PDF cannot be read: {detail}") from exc
    return _build(pages, num_broken, title=title, notes=notes)


def _unlock(reader: PdfReader) -> None:
    """Open a PDF that only restricts printing or copying; one with a password stays shut."""
    if reader.is_encrypted and not reader.decrypt(""):
        raise DocumentSkippedError(SkipReason.LOCKED, "the PDF asks for a password")


def _title(reader: PdfReader) -> str:
    """Return the title its author gave, not what a program fills in by itself."""
    title = str(reader.metadata.title or "").strip() if reader.metadata else ""
    return "" if title.lower() in _NO_TITLES or title.startswith("Microsoft ") else title


def _read_pages(reader: PdfReader) -> tuple[list[str], int]:
    pages: list[str] = []
    num_broken = 0
    for page in reader.pages:
        try:
            pages.append(page.extract_text())
        except (FileNotDecryptedError, DependencyError):
            raise
        except Exception:  # noqa: BLE001 - one damaged page must not lose the others
            num_broken += 1
            pages.append("")
    return pages, num_broken


def _build(
    pages: list[str], num_broken: int, *, title: str, notes: tuple[str, ...]
) -> ExtractedDocument:
    builder = TextBuilder()
    num_blank = 0
    for page in pages:
        text = _HYPHENATED.sub("", page.replace("\r\n", "\n")).translate(_LIGATURES)
        num_blank += not text.strip()
        for paragraph in _BLANK_LINES.split(text):
            builder.add(BlockKind.PARAGRAPH, paragraph)
    if builder.is_empty:
        what = "every page is damaged" if num_broken else "pictures only? It would need OCR"
        reason = SkipReason.BROKEN if num_broken else SkipReason.NO_TEXT
        raise DocumentSkippedError(reason, f"no text on {len(pages)} pages: {what}")
    if num_broken:
        notes = (*notes, f"{num_broken} of {len(pages)} pages are damaged and were left out")
    if num_blank > num_broken:
        notes = (*notes, f"{num_blank - num_broken} of {len(pages)} pages have no text layer")
    return builder.build(title=title, notes=notes)
