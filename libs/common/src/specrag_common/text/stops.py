"""Stop strings: finding them, and knowing what text might still become one.

Rule: text is judged as it grows, token by token. Of the matches complete by then the earliest
wins, then the longest; the text ends where the match begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StopMatch:
    """A stop string in a text.

    Attributes:
        start: code point where the match begins: the length of the text that is kept.
        stop: the string.
    """

    start: int
    stop: str


class StopMatcher:
    """Searches for a fixed set of stop strings; immutable and safe to share."""

    __slots__ = ("_max_length", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        """Prepare ``stops``.

        Raises:
            ValueError: a stop string is empty.
        """
        if "" in stops:
            raise ValueError("a stop string is empty; it would end every answer at once")
        self._stops = tuple(sorted(set(stops), key=lambda stop: (-len(stop), stop)))
        self._max_length = len(self._stops[0]) if self._stops else 0

    @property
    def max_length(self) -> int:
        """Code points of the longest stop string; 0 without any."""
        return self._max_length

    def find(self, text: str, *, search_from: int = 0) -> StopMatch | None:
        """Return the earliest match, the longest of those, that starts at ``search_from`` or later.

        Text already searched without a match needs no second look but at its last
        ``max_length - 1`` code points.
        """
        best: StopMatch | None = None
        for stop in self._stops:
            start = text.find(stop, search_from)
            if start != -1 and (best is None or start < best.start):
                best = StopMatch(start=start, stop=stop)
        return best

    def held_back(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that could begin a stop string."""
        return max((_count_overlap(text, stop) for stop in self._stops), default=0)


def _count_overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
