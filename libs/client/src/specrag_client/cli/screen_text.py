"""Making foreign text safe to show on a terminal."""

from __future__ import annotations

import unicodedata
from typing import Final

from specrag_client.cli.wrapping import cells_of

_REPLACEMENT: Final = "\ufffd"
_BIDI_CONTROLS: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def printable(text: str) -> str:
    """Return text of the same length that cannot steer the terminal.

    Control characters (escape sequences begin with one) and direction overrides are replaced;
    tabs become blanks, line feeds stay.
    """
    return "".join(map(_printable_character, text))


def one_line(text: str) -> str:
    """Return printable text with every run of white space as one blank."""
    return printable(" ".join(text.split()))


def cut(text: str, width: int) -> str:
    """Return the text, ended by an ellipsis where it does not fit into ``width`` cells."""
    if sum(map(cells_of, text)) <= width:
        return text
    kept: list[str] = []
    left = width - 1
    for character in text:
        left -= cells_of(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept).rstrip() + "…"


def _printable_character(character: str) -> str:
    if character == "\t":
        return " "
    if character == "\n":
        return character
    if unicodedata.category(character) in {"Cc", "Cs"} or character in _BIDI_CONTROLS:
        return _REPLACEMENT
    return character
