"""Markdown: what a reader sees, without markup, comments, pictures and link targets."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from markdown_it import MarkdownIt

from specrag_retriever.documents.builder import TextBuilder
from specrag_retriever.documents.html import html_to_line
from specrag_retriever.documents.model import BlockKind, ExtractedDocument
from specrag_retriever.documents.tables import add_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markdown_it.token import Token

_FRONT_MATTER: Final = re.compile(r"\A---[ \t]*\n(.*?)\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.S)
_FRONT_MATTER_LINE: Final = re.compile(r"[\w.-]+[ \t]*:(?:[ \t].*)?|[ \t]+.*|-[ \t].*|#.*|\s*")
_TITLE_LINE: Final = re.compile(r"^title[ \t]*:[ \t]*(.+)$", re.M)
_MAX_FRONT_MATTER_CHARS: Final = 20_000
_MAX_NESTING: Final = 60


def parse_markdown(text: str, notes: tuple[str, ...] = ()) -> ExtractedDocument:
    """Return the visible text of a Markdown document.

    Front matter is left out when it is well formed (its title is kept); damaged front matter is
    text like any other.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    title, damaged, body = _split_front_matter(text)
    writer = _Writer()
    writer.builder.add(BlockKind.PARAGRAPH, damaged)
    parser = MarkdownIt("commonmark", {"maxNesting": _MAX_NESTING})
    writer.write(parser.enable(["table", "strikethrough"]).parse(body))
    if writer.builder.is_empty and "<" not in body:  # nested deeper than the parser goes
        writer.builder.add(BlockKind.PARAGRAPH, body)
    return writer.builder.build(title=title or writer.first_heading, notes=notes)


def _split_front_matter(text: str) -> tuple[str, str, str]:
    """Return the title, the front matter where it is damaged, and the rest."""
    found = _FRONT_MATTER.match(text[:_MAX_FRONT_MATTER_CHARS])
    if found is None:
        return "", "", text
    if not all(map(_is_front_matter_line, found[1].split("\n"))):
        return "", found[1], text[found.end() :]
    title = _TITLE_LINE.search(found[1])
    return title[1].strip().strip("\"'") if title else "", "", text[found.end() :]


def _is_front_matter_line(line: str) -> bool:
    value = line.partition(":")[2].strip()
    is_closed = not value.startswith(('"', "'")) or (len(value) > 1 and value.endswith(value[0]))
    return is_closed and _FRONT_MATTER_LINE.fullmatch(line) is not None


@dataclass(slots=True)
class _Table:
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    in_header: bool = False


class _Writer:
    """Walks the token stream; one method a kind of token, the rest is ignored."""

    def __init__(self) -> None:
        self.builder = TextBuilder()
        self.first_heading = ""
        self._heading_level = 0
        self._list_counters: list[int | None] = []
        self._item_prefix = ""
        self._table: _Table | None = None

    def write(self, tokens: Sequence[Token]) -> None:
        """Append every block of the token stream."""
        for token in tokens:
            handler = getattr(self, f"_on_{token.type}", None)
            if handler is not None:
                handler(token)

    def _on_heading_open(self, token: Token) -> None:
        self._heading_level = int(token.tag[1:])

    def _on_heading_close(self, _token: Token) -> None:
        self._heading_level = 0

    def _on_bullet_list_open(self, _token: Token) -> None:
        self._list_counters.append(None)

    def _on_ordered_list_open(self, token: Token) -> None:
        self._list_counters.append(int(token.attrGet("start") or 1))

    def _on_list_close(self, _token: Token) -> None:
        self._list_counters.pop()

    _on_bullet_list_close = _on_ordered_list_close = _on_list_close

    def _on_list_item_open(self, _token: Token) -> None:
        counter = self._list_counters[-1]
        marker = "-" if counter is None else f"{counter}."
        if counter is not None:
            self._list_counters[-1] = counter + 1
        self._item_prefix = "  " * (len(self._list_counters) - 1) + marker + " "

    def _on_table_open(self, _token: Token) -> None:
        self._table = _Table()

    def _on_thead_open(self, _token: Token) -> None:
        assert self._table is not None, "the parser opens a table before its head"
        self._table.in_header = True

    def _on_thead_close(self, _token: Token) -> None:
        assert self._table is not None, "the parser opens a table before its head"
        self._table.in_header = False

    def _on_tr_open(self, _token: Token) -> None:
        assert self._table is not None, "the parser opens a table before its rows"
        if not self._table.in_header:
            self._table.rows.append([])

    def _on_table_close(self, _token: Token) -> None:
        assert self._table is not None, "the parser opens a table before closing it"
        add_table(self.builder, self._table.header, self._table.rows)
        self._table = None

    def _on_inline(self, token: Token) -> None:
        text = _inline_text(token.children or [])
        if self._table is not None:
            row = self._table.header if self._table.in_header else self._table.rows[-1]
            row.append(text)
        elif self._heading_level:
            self.builder.add(BlockKind.HEADING, text, level=self._heading_level)
            self.first_heading = self.first_heading or text
        elif self._item_prefix:
            self.builder.add(BlockKind.LIST_ITEM, self._item_prefix + text)
            self._item_prefix = ""
        else:
            self.builder.add(BlockKind.PARAGRAPH, text)

    def _on_fence(self, token: Token) -> None:
        self.builder.add(BlockKind.CODE, token.content)

    _on_code_block = _on_fence

    def _on_html_block(self, token: Token) -> None:
        self.builder.add(BlockKind.PARAGRAPH, html_to_line(token.content))


def _inline_text(children: Sequence[Token]) -> str:
    parts = []
    for child in children:
        if child.type in {"text", "code_inline", "image"}:
            parts.append(child.content)
        elif child.type in {"softbreak", "hardbreak"}:
            parts.append("\n")
    return "".join(parts)
