"""Breaking growing text into terminal lines so that finished lines never change.

:func:`wrap_lines` reads from left to right and never goes back over a break, so all lines but the
last of any text are the first lines of every text that begins with it. That is what lets a view
print committed lines for good and redraw only the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rich.cells import get_character_cell_size

_EMOJI_SELECTOR: Final = "\ufe0f"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the screen: code points ``start`` to ``end``; a break may follow unseen."""

    start: int
    end: int


def cells_of(character: str) -> int:
    """Return how many cells a character may take; rather one too many than one too few."""
    if character == _EMOJI_SELECTOR:
        return 1
    return get_character_cell_size(character)


def wrap_lines(text: str, width: int) -> list[Line]:
    """Break text at line feeds and before words that do not fit into ``width`` cells.

    Wide (CJK) characters may be parted from each other anywhere. A word longer than a line begins
    on a line of its own and is cut. Blanks at a break stay on the ended line, where they may reach
    beyond ``width``: strip them. Always at least one line; a character wider than ``width`` gets a
    line of its own.
    """
    wrapper = _Wrapper(width)
    for index, character in enumerate(text):
        wrapper.feed(index, character)
    return [*wrapper.lines, Line(wrapper.start, len(text))]


class _Wrapper:
    """Where the current line and its last word begin, and how many cells they take."""

    def __init__(self, width: int) -> None:
        self.lines: list[Line] = []
        self.start = 0
        self._width = width
        self._line_cells = 0
        self._word_start = 0
        self._word_cells = 0

    def feed(self, index: int, character: str) -> None:
        """Take the next character."""
        if character == "\n":
            self._break(index, next_start=index + 1)
        elif character == " ":
            self._line_cells += 1
            self._begin_word(index + 1)
        else:
            self._place(index, cells_of(character))

    def _place(self, index: int, cells: int) -> None:
        if cells == 2:
            self._begin_word(index)
        if self._line_cells + cells > self._width and index > self.start:
            break_at = self._word_start if self._word_start > self.start else index
            carried_cells = self._word_cells if break_at == self._word_start else 0
            self._break(break_at, next_start=break_at)
            self._line_cells = self._word_cells = carried_cells
        self._line_cells += cells
        self._word_cells += cells
        if cells == 2:
            self._begin_word(index + 1)

    def _begin_word(self, index: int) -> None:
        self._word_start = index
        self._word_cells = 0

    def _break(self, end: int, *, next_start: int) -> None:
        self.lines.append(Line(self.start, end))
        self.start = next_start
        self._line_cells = 0
        self._begin_word(next_start)
