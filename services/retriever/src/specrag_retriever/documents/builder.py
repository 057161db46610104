"""Collects blocks into the extracted text, cleaning them and keeping their offsets."""

from __future__ import annotations

import re
from typing import Final

from specrag_retriever.documents.model import Block, BlockKind, ExtractedDocument

_FLAG_SEQUENCE: Final = "\U0001f3f4[\U000e0020-\U000e007e]+\U000e007f"
_INVISIBLE: Final = re.compile(
    f"({_FLAG_SEQUENCE})"
    "|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ufff9-\ufffb\ufffe\uffff\U000e0000-\U000e007f]"
)
_SILENTLY_DROPPED: Final = re.compile("[\u00ad\ufeff]")
_LINE_ENDS: Final = re.compile("\r\n?|\u0085|\u2028|\u2029")
_INDENTED: Final = frozenset({BlockKind.CODE, BlockKind.LIST_ITEM})
_RUNS_TOGETHER: Final = frozenset({BlockKind.TABLE_ROW, BlockKind.LIST_ITEM})


class TextBuilder:
    """Appends blocks; :meth:`build` returns the document.

    Control characters and Unicode tag characters (a way to hide instructions from the reader's
    eyes) are removed and counted; emoji flag sequences, joiners and bidi controls stay.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._parts: list[str] = []
        self._blocks: list[Block] = []
        self._num_chars = 0
        self._num_invisible = 0

    @property
    def is_empty(self) -> bool:
        """Whether no block with visible text was added."""
        return not self._blocks

    def add(self, kind: BlockKind, text: str, *, level: int = 0) -> None:
        """Append a block; text without a visible character is left out."""
        cleaned = self._clean(text)
        if kind not in _INDENTED:
            cleaned = cleaned.lstrip(" \t")
        if not cleaned:
            return
        self._separate(kind)
        start = self._num_chars
        self._push(cleaned)
        self._blocks.append(Block(kind=kind, start=start, end=self._num_chars, level=level))

    def build(self, *, title: str = "", notes: tuple[str, ...] = ()) -> ExtractedDocument:
        """Return what was collected."""
        if self._num_invisible:
            notes = (*notes, f"removed {self._num_invisible} invisible control characters")
        return ExtractedDocument(
            text="".join(self._parts),
            blocks=tuple(self._blocks),
            title=" ".join(self._clean(title).split()),
            notes=notes,
        )

    def _clean(self, text: str) -> str:
        text = _SILENTLY_DROPPED.sub("", _LINE_ENDS.sub("\n", text))
        text = _INVISIBLE.sub(self._drop_invisible, text)
        lines = [line.rstrip() for line in text.split("\n")]
        return "\n".join(lines).strip("\n") if text.strip() else ""

    def _drop_invisible(self, match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        self._num_invisible += 1
        return ""

    def _separate(self, kind: BlockKind) -> None:
        if not self._blocks:
            return
        is_run = self._blocks[-1].kind is kind and kind in _RUNS_TOGETHER
        self._push("\n" if is_run else "\n\n")

    def _push(self, text: str) -> None:
        self._parts.append(text)
        self._num_chars += len(text)
