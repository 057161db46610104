"""HTML: the text a browser would show.

Scripts, styles, comments, templates and elements hidden by attribute or inline style are left
out; entities are decoded, white space is collapsed as a browser does. The walk is iterative, so
deeply nested pages cannot exhaust the stack.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from selectolax.lexbor import LexborHTMLParser

from specrag_retriever.documents.builder import TextBuilder
from specrag_retriever.documents.model import (
    BlockKind,
    DocumentSkippedError,
    ExtractedDocument,
    SkipReason,
)
from specrag_retriever.documents.tables import add_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from selectolax.lexbor import LexborNode

MAX_NESTING: Final = 2_000
"""Deeper pages are refused: the parser's time grows with the square of the depth."""

_SKIPPED: Final = frozenset(
    {
        "script", "style", "template", "noscript", "head", "iframe", "object", "embed", "svg",
        "math", "canvas", "audio", "video", "picture", "select", "datalist", "button", "dialog",
    }
)  # fmt: skip
_INLINE: Final = frozenset(
    {
        "a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn",
        "em", "font", "i", "ins", "kbd", "label", "mark", "nobr", "output", "q", "ruby", "s",
        "samp", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u", "var",
        "wbr", "img", "input", "meter", "progress",
    }
)  # fmt: skip
_SILENT: Final = frozenset({"rp", "rt"})
_LAYOUT: Final = frozenset({"table", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "pre", "form"})
_HIDDEN_STYLE: Final = re.compile(r"display\s*:\s*none|visibility\s*:\s*hidden", re.I)
_TAG: Final = re.compile(r"<(/?)(div|span|b|i|font|section|blockquote|em|strong|ul|ol)\b", re.I)
_SPACES: Final = re.compile(r"[ \t\n\f\r]+")


def parse_html(text: str, notes: tuple[str, ...] = ()) -> ExtractedDocument:
    """Return the visible text of a page.

    Raises:
        DocumentSkippedError: BROKEN when elements are nested absurdly deep.
    """
    _refuse_deep_nesting(text)
    tree = LexborHTMLParser(text)
    walker = _Walker()
    if tree.body is not None:
        walker.walk(tree.body)
    titles = tree.css("head > title")
    title = _SPACES.sub(" ", titles[0].text()).strip() if titles else ""
    return walker.builder.build(title=title or walker.first_heading, notes=notes)


def html_to_line(fragment: str) -> str:
    """Return the visible text of a fragment as one paragraph."""
    blocks = parse_html(fragment)
    return blocks.text.replace("\n\n", "\n")


def _refuse_deep_nesting(text: str) -> None:
    depth = 0
    for match in _TAG.finditer(text):
        depth = max(0, depth - 1) if match[1] else depth + 1
        if depth > MAX_NESTING:
            raise DocumentSkippedError(
                SkipReason.BROKEN, f"elements nested more than {MAX_NESTING} deep"
            )


@dataclass(slots=True)
class _Run:
    """Inline text collected for the block being written."""

    kind: BlockKind = BlockKind.PARAGRAPH
    level: int = 0
    prefix: str = ""
    parts: list[str] = field(default_factory=list)


class _Walker:
    """Writes blocks while visiting the visible nodes in document order."""

    def __init__(self) -> None:
        self.builder = TextBuilder()
        self.first_heading = ""
        self._run = _Run()
        self._lists: list[int | None] = []

    def walk(self, root: LexborNode) -> None:
        """Append everything visible below ``root``."""
        for node, is_end in _visit(root):
            if is_end:
                self._leave(node)
            elif node.is_text_node:
                self._run.parts.append(_SPACES.sub(" ", node.text_content or ""))
            else:
                self._enter(node)
        self._flush()

    def _enter(self, node: LexborNode) -> None:
        tag = node.tag or ""
        if tag == "br":
            self._run.parts.append("\n")
        elif tag in _INLINE or tag in _SILENT:
            return
        elif tag == "table" and not _is_layout(node):
            self._flush()
            add_table(self.builder, *_table_cells(node))
        elif tag == "pre":
            self._flush()
            self.builder.add(BlockKind.CODE, _visible_text(node))
        else:
            self._flush()
            self._open_block(tag, node)

    def _open_block(self, tag: str, node: LexborNode) -> None:
        if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}:
            self._run = _Run(kind=BlockKind.HEADING, level=int(tag[1]))
        elif tag in {"ul", "ol"}:
            self._lists.append(1 if tag == "ol" else None)
        elif tag == "li":
            self._run = _Run(kind=BlockKind.LIST_ITEM, prefix=self._next_marker())
        elif tag in {"td", "th"} and node.prev is not None:
            self._run = _Run()

    def _leave(self, node: LexborNode) -> None:
        tag = node.tag or ""
        if tag in _INLINE or tag == "br":
            return
        self._flush()
        if tag in {"ul", "ol"} and self._lists:
            self._lists.pop()

    def _next_marker(self) -> str:
        if not self._lists:
            return "- "
        counter = self._lists[-1]
        if counter is not None:
            self._lists[-1] = counter + 1
        indent = "  " * (len(self._lists) - 1)
        return f"{indent}- " if counter is None else f"{indent}{counter}. "

    def _flush(self) -> None:
        run, self._run = self._run, _Run()
        text = _tidy("".join(run.parts))
        if not text:
            if run.prefix and not run.parts:
                self._run = run  # a list item whose text begins inside an inner block
            return
        self.builder.add(run.kind, run.prefix + text, level=run.level)
        if run.kind is BlockKind.HEADING:
            self.first_heading = self.first_heading or text


def _visit(root: LexborNode) -> Iterator[tuple[LexborNode, bool]]:
    """Yield visible nodes in document order, elements also when they end.

    Tables that hold data and preformatted text are yielded whole, without their inside.
    """
    stack: list[tuple[LexborNode, bool]] = [(root, False)]
    while stack:
        node, is_end = stack.pop()
        yield node, is_end
        if is_end or not node.is_element_node:
            continue
        stack.append((node, True))
        if node.tag == "pre" or (node.tag == "table" and not _is_layout(node)):
            continue
        stack.extend((child, False) for child in reversed(_visible_children(node)))


def _visible_children(node: LexborNode) -> list[LexborNode]:
    children = []
    child = node.child
    while child is not None:
        if child.is_text_node or (child.is_element_node and _is_visible(child)):
            children.append(child)
        child = child.next
    return children


def _is_visible(node: LexborNode) -> bool:
    if node.tag in _SKIPPED:
        return False
    attributes = node.attributes
    return "hidden" not in attributes and not _HIDDEN_STYLE.search(attributes.get("style") or "")


def _is_layout(table: LexborNode) -> bool:
    """Tell a table that arranges a page from one that holds data."""
    stack = _visible_children(table)
    while stack:
        node = stack.pop()
        if node.tag in _LAYOUT:
            return True
        stack.extend(_visible_children(node))
    return False


def _table_cells(table: LexborNode) -> tuple[list[str] | None, list[list[str]]]:
    rows: list[tuple[bool, list[str]]] = []
    stack = list(reversed(_visible_children(table)))
    while stack:
        node = stack.pop()
        if node.tag == "tr":
            rows.append(_row_cells(node))
        elif node.tag == "caption":
            rows.append((False, [_tidy(_visible_text(node))]))
        else:
            stack.extend(reversed(_visible_children(node)))
    header_at = next((index for index, (is_header, _) in enumerate(rows) if is_header), None)
    if header_at is None:
        return None, [cells for _, cells in rows]
    body = [cells for index, (_, cells) in enumerate(rows) if index != header_at]
    return rows[header_at][1], body


def _row_cells(row: LexborNode) -> tuple[bool, list[str]]:
    cells: list[str] = []
    tags = set()
    for cell in _visible_children(row):
        if cell.tag not in {"td", "th"}:
            continue
        tags.add(cell.tag)
        span = cell.attributes.get("colspan") or "1"
        width = min(int(span), 100) if span.isdecimal() else 1
        cells += [_tidy(_visible_text(cell))] * max(1, width)
    return tags == {"th"}, cells


def _visible_text(node: LexborNode) -> str:
    parts: list[str] = []
    for inner, is_end in _visit_all(node):
        if inner.is_text_node:
            parts.append(inner.text_content or "")
        elif is_end == (inner.tag != "br") and inner.tag not in _INLINE:
            parts.append("\n")  # at a line break, and after a block
    return "".join(parts)


def _visit_all(root: LexborNode) -> Iterator[tuple[LexborNode, bool]]:
    stack: list[tuple[LexborNode, bool]] = [(root, False)]
    while stack:
        node, is_end = stack.pop()
        yield node, is_end
        if not is_end and node.is_element_node:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(_visible_children(node)))


def _tidy(text: str) -> str:
    """Collapse spaces, keep the line breaks that ``br`` asked for."""
    lines = (" ".join(line.replace("\u00a0", " ").split()) for line in text.split("\n"))
    return "\n".join(lines).strip()
