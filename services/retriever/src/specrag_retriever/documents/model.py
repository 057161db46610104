"""What a parser hands on: the extracted text with its structure, or a named reason to skip."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BlockKind(StrEnum):
    """What a stretch of extracted text is."""

    HEADING = "heading"
    PARAGRAPH = "paragraph"
    LIST_ITEM = "list_item"
    TABLE_ROW = "table_row"
    CODE = "code"


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A stretch of the extracted text that belongs together.

    Attributes:
        kind: what it is.
        start: offset of its first code point.
        end: offset after its last code point.
        level: 1 (outermost) to 6 for headings, 0 otherwise.
    """

    kind: BlockKind
    start: int
    end: int
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractedDocument:
    """A document as plain text.

    Attributes:
        text: everything that may be searched and quoted; all offsets count its code points.
        blocks: in order, not overlapping; only white space lies between them.
        title: as found in the document; empty when it has none.
        notes: damage that was repaired, one line each, for the caller to see.
    """

    text: str
    blocks: tuple[Block, ...]
    title: str
    notes: tuple[str, ...] = ()


class SkipReason(StrEnum):
    """Why a document is not searchable; the names travel to the caller."""

    EMPTY = "EMPTY"
    BINARY = "BINARY"
    LOCKED = "LOCKED"
    BROKEN = "BROKEN"
    NO_TEXT = "NO_TEXT"
    TOO_LARGE = "TOO_LARGE"
    UNSUPPORTED = "UNSUPPORTED"


class DocumentSkippedError(Exception):
    """A document that cannot be made searchable. It never stops the others."""

    def __init__(self, reason: SkipReason, detail: str) -> None:
        """Keep the reason and one line in words."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
