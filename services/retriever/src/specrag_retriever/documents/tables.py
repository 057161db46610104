"""Table rows as lines that can be understood alone.

A passage holds a few rows of a long table, so every row carries its column names:
``Grade: B2; Pay: 4,100 EUR``. A row with many columns becomes several lines, each beginning with
the row's first cell, so that no line depends on another to be understood.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specrag_retriever.documents.model import BlockKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_retriever.documents.builder import TextBuilder

CELLS_PER_LINE: Final = 12
"""Most cells in one line, the repeated first one included."""


def add_table(
    builder: TextBuilder, header: Sequence[str] | None, rows: Sequence[Sequence[str]]
) -> None:
    """Append every row; ``header`` is ``None`` for a table without column names.

    A header whose cells are all one spanning text names the table, not its columns.
    """
    names = [_flat(cell) for cell in header or ()]
    if names and len(set(names)) == 1 and max(map(len, rows), default=0) > 1:
        builder.add(BlockKind.PARAGRAPH, names[0])
        names = []
    if names and not rows:
        builder.add(BlockKind.TABLE_ROW, " | ".join(names))
    for row in rows:
        for line in render_row(names, row):
            builder.add(BlockKind.TABLE_ROW, line)


def render_row(names: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Return the lines of one row; cells without a name stand alone, empty ones are left out."""
    if not names:
        joined = " | ".join(_flat(cell) for cell in cells)
        return [joined] if joined.strip(" |") else []
    shown = [_name_cell(names, index, cell) for index, cell in enumerate(cells) if cell.strip()]
    if len(shown) <= CELLS_PER_LINE:
        return ["; ".join(shown)] if shown else []
    key, rest = shown[0], shown[1:]
    step = CELLS_PER_LINE - 1
    return ["; ".join([key, *rest[at : at + step]]) for at in range(0, len(rest), step)]


def _name_cell(names: Sequence[str], index: int, cell: str) -> str:
    value = _flat(cell)
    name = names[index] if index < len(names) else ""
    return f"{name}: {value}" if name else value


def _flat(cell: str) -> str:
    return " ".join(cell.split())
