"""Documents to passages: whole blocks packed up to a token budget, headings with their text.

A passage is a stretch of the extracted text, so ``text[start:end]`` is exactly the passage. It
begins at a heading where one is near; a heading never ends a passage; blocks over the budget are
cut at sentences, then white space, then anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag_retriever.chunking.cutting import MAX_PIECE_CHARS, cut
from specrag_retriever.chunking.token_spans import TokenSpans, compute_token_spans
from specrag_retriever.documents.model import BlockKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenizers import Tokenizer

    from specrag_retriever.documents.model import Block, ExtractedDocument

_SLACK_TOKENS: Final = 2
"""Kept free: a stretch tokenized alone may count a little more than within the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPassage:
    """A stretch of a document's extracted text.

    Attributes:
        start: offset of its first code point.
        end: offset after its last code point.
        headings: the headings above its first line, outermost first.
        text: exactly ``document.text[start:end]``.
    """

    start: int
    end: int
    headings: tuple[str, ...]
    text: str


def split_into_passages(
    document: ExtractedDocument, tokenizer: Tokenizer, max_tokens: int
) -> list[TextPassage]:
    """Return the passages in order; together they hold all visible text, none overlap.

    Args:
        document: what to split.
        tokenizer: counts tokens.
        max_tokens: most tokens of a passage tokenized alone.
    """
    spans = compute_token_spans(tokenizer, document.text)
    packer = _Packer(document, spans, max(1, max_tokens - _SLACK_TOKENS))
    for block in document.blocks:
        packer.add(block)
    packer.close()
    return list(_enforce(packer.passages, tokenizer, max_tokens))


def _enforce(
    passages: Sequence[TextPassage], tokenizer: Tokenizer, max_tokens: int
) -> Iterator[TextPassage]:
    """Halve the rare passage that counts more alone than it did within the text."""
    for passage in passages:
        spans = compute_token_spans(tokenizer, passage.text)
        if len(spans) <= max_tokens:
            yield passage
            continue
        halves = list(
            cut(passage.text, spans, 0, len(passage.text), max_tokens=max(1, len(spans) * 2 // 3))
        )
        if len(halves) == 1:  # a single character of several tokens cannot be cut
            yield passage
            continue
        parts = [
            TextPassage(
                start=passage.start + half.start,
                end=passage.start + half.end,
                headings=passage.headings,
                text=passage.text[half.start : half.end],
            )
            for half in halves
        ]
        yield from _enforce(parts, tokenizer, max_tokens)


@dataclass(slots=True)
class _Open:
    """The passage being filled: an unbroken run of blocks or pieces of blocks."""

    start: int
    end: int
    headings: tuple[str, ...]
    last_content_end: int = -1
    trailing: list[Block] = field(default_factory=list)
    """Headings after the last content; they move to the next passage when this one closes."""


class _Packer:
    """Packs blocks in order; complexity O(blocks · log tokens)."""

    def __init__(self, document: ExtractedDocument, spans: TokenSpans, max_tokens: int) -> None:
        self.passages: list[TextPassage] = []
        self._text = document.text
        self._spans = spans
        self._max_tokens = max_tokens
        self._open: _Open | None = None
        self._path: list[tuple[int, str]] = []

    def add(self, block: Block) -> None:
        """Take the next block."""
        if block.kind is BlockKind.HEADING:
            self._begin_section(block)
        if self._is_within(block.start, block.end) and not self._fits_after(block):
            self._close_keeping_headings()
        if self._fits_after(block):
            self._extend(block)
        else:
            self._add_in_pieces(block)

    def close(self) -> None:
        """Finish the passage being filled."""
        if self._open is not None:
            self._emit(self._open.start, self._open.end, self._open.headings)
            self._open = None

    def _begin_section(self, block: Block) -> None:
        """Close a passage that is full enough: a section's text stays with its heading."""
        has_content = self._open is not None and self._open.last_content_end >= 0
        if has_content and self._num_open_tokens() >= self._section_threshold(block.level):
            self._close_keeping_headings()
        while self._path and self._path[-1][0] >= block.level:
            self._path.pop()

    def _section_threshold(self, level: int) -> int:
        return self._max_tokens // 4 if level <= 2 else self._max_tokens // 2

    def _num_open_tokens(self) -> int:
        return self._spans.count(self._open.start, self._open.end) if self._open else 0

    def _fits_after(self, block: Block) -> bool:
        start = self._open.start if self._open is not None else block.start
        return self._is_within(start, block.end)

    def _is_within(self, start: int, end: int) -> bool:
        is_short = end - start <= MAX_PIECE_CHARS
        return is_short and self._spans.count(start, end) <= self._max_tokens

    def _extend(self, block: Block) -> None:
        opened = self._open or _Open(block.start, block.end, self._current_path())
        self._open = opened
        opened.end = block.end
        if block.kind is BlockKind.HEADING:
            opened.trailing.append(block)
            self._path.append((block.level, self._text[block.start : block.end]))
        else:
            opened.trailing.clear()
            opened.last_content_end = block.end

    def _add_in_pieces(self, block: Block) -> None:
        """Cut a block over the budget; its first piece shares a passage with its headings."""
        remaining = self._max_tokens
        if self._open is not None:
            remaining -= self._spans.count(self._open.start, block.start)
        if remaining < self._max_tokens // 4:
            self.close()
            remaining = self._max_tokens
        start = self._open.start if self._open is not None else block.start
        pieces = cut(
            self._text,
            self._spans,
            block.start,
            block.end,
            max_tokens=self._max_tokens,
            first_tokens=max(1, remaining),
        )
        headings = self._open.headings if self._open is not None else self._current_path()
        self._open = None
        for piece in pieces:
            self._emit(start, piece.end, headings)
            headings = self._current_path()
            start = piece.end
        self._reopen_last(block)

    def _reopen_last(self, block: Block) -> None:
        """Let what follows join the last piece, which is usually short."""
        last = self.passages.pop()
        self._open = _Open(last.start, last.end, last.headings, last_content_end=last.end)
        if block.kind is BlockKind.HEADING:
            self._path.append((block.level, " ".join(self._text[block.start : block.end].split())))

    def _close_keeping_headings(self) -> None:
        opened = self._open
        if opened is None or not opened.trailing:
            self.close()
            return
        carried = opened.trailing
        if opened.last_content_end < 0:
            return  # headings only: they wait for their text
        self._emit(opened.start, opened.last_content_end, opened.headings)
        first_level = carried[0].level
        above = tuple(name for level, name in self._path if level < first_level)
        self._open = _Open(carried[0].start, carried[-1].end, above, trailing=list(carried))

    def _emit(self, start: int, end: int, headings: tuple[str, ...]) -> None:
        for piece in cut(self._text, self._spans, start, end, max_tokens=self._max_tokens):
            text = self._text[piece.start : piece.end]
            self.passages.append(
                TextPassage(start=piece.start, end=piece.end, headings=headings, text=text)
            )

    def _current_path(self) -> tuple[str, ...]:
        return tuple(name for _, name in self._path)
