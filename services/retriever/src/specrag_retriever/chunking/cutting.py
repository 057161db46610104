"""Cuts a long stretch of text at the best place within a token budget.

Only the stretch between the earliest and the latest allowed cut is looked at, so the time is
linear in the text, whatever it holds: a line of a million characters, or one endless word.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_retriever.chunking.token_spans import TokenSpans

MAX_PIECE_CHARS: Final = 12_000
"""A piece stays below 48 kB of UTF-8 even where a token covers many characters."""

_SENTENCE_END: Final = re.compile(r"""[.!?…]["'”’)\]]*(?=\s)|[。！？；]["”’」』）]*|\n""")
_JOINER: Final = "\u200d"
_MAX_STEP_BACK: Final = 64


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text without white space at its ends."""

    start: int
    end: int


def cut(
    text: str, spans: TokenSpans, start: int, end: int, *, max_tokens: int, first_tokens: int = 0
) -> Iterator[Piece]:
    """Yield pieces that cover the visible text of ``[start, end)`` in order.

    Args:
        text: the whole text.
        spans: its tokens.
        start: where to begin.
        end: where to stop.
        max_tokens: most tokens a piece, at least 1.
        first_tokens: budget of the first piece; 0 means ``max_tokens``.
    """
    budget = first_tokens or max_tokens
    while (piece := _trim(text, start, end)) is not None:
        limit = _latest_cut(spans, piece, budget)
        stop = piece.end if limit >= piece.end else _best_cut(text, piece.start, limit)
        trimmed = _trim(text, piece.start, stop)
        assert trimmed is not None, "a piece begins with a visible character"
        yield trimmed
        start, budget = stop, max_tokens


def _trim(text: str, start: int, end: int) -> Piece | None:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return Piece(start, end) if start < end else None


def _latest_cut(spans: TokenSpans, piece: Piece, max_tokens: int) -> int:
    by_tokens = spans.offset_after(piece.start, max_tokens)
    latest = piece.end if by_tokens is None else min(by_tokens, piece.end)
    return max(piece.start + 1, min(latest, piece.start + MAX_PIECE_CHARS))


def _best_cut(text: str, start: int, limit: int) -> int:
    """Return the last sentence end in the second half, else white space, else a safe place."""
    earliest = start + max(1, (limit - start) // 2)
    sentence = -1
    for match in _SENTENCE_END.finditer(text, earliest, limit):
        sentence = match.end()
    if sentence > start:
        return sentence
    space = max(text.rfind(" ", earliest, limit), text.rfind("\t", earliest, limit))
    return space if space > start else _safe_cut(text, start, limit)


def _safe_cut(text: str, start: int, limit: int) -> int:
    """Step back out of a character sequence that is read as one (accents, emoji families)."""
    for at in range(limit, max(start, limit - _MAX_STEP_BACK), -1):
        if at >= len(text) or not _continues(text[at - 1], text[at]):
            return at
    return limit


def _continues(before: str, after: str) -> bool:
    if _JOINER in (before, after):
        return True
    is_mark = unicodedata.category(after) in {"Mn", "Me", "Mc"}
    is_modifier = "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f"
    is_flag = "\U0001f1e6" <= before <= "\U0001f1ff" and "\U0001f1e6" <= after <= "\U0001f1ff"
    return is_mark or is_modifier or is_flag
