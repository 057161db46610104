"""Plain text: paragraphs are what blank lines separate."""

from __future__ import annotations

import re
from typing import Final

from specrag_retriever.documents.builder import TextBuilder
from specrag_retriever.documents.model import BlockKind, ExtractedDocument

_BLANK_LINES: Final = re.compile(r"\n[ \t\f\v]*\n\s*")
_LINE_ENDS: Final = re.compile(r"\r\n?")


def parse_plain_text(text: str, notes: tuple[str, ...] = ()) -> ExtractedDocument:
    """Return the text as paragraphs, line breaks inside them kept."""
    builder = TextBuilder()
    for paragraph in _BLANK_LINES.split(_LINE_ENDS.sub("\n", text)):
        builder.add(BlockKind.PARAGRAPH, paragraph)
    return builder.build(notes=notes)
