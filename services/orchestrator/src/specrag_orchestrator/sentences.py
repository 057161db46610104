"""Sentences and content words of a text, enough to compare an answer with its sources.

Western and CJK text, no model. A sentence ends behind ``. ! ? …`` (closing quotes and brackets
included) when white space follows, behind ``。！？`` at once, and at line ends. Citation markers
right behind the end belong to the sentence.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Final

MARKER: Final = re.compile(
    r"[\[【]\s*(?:passages?\s+|sources?\s+)?(\d{1,6}(?:\s*[,;]\s*\d{1,6})*)\s*[\]】]", re.IGNORECASE
)
"""An inline citation: ``[3]``, ``[1, 4]``, ``[Passage 2]``."""

_END: Final = re.compile(
    r"""(?:[.!?…]+["'”’)\]]*(?=\s|$|[\[【]\s*\d)|[。！？｡]+["'”’」』）]*|\n)"""
)
_TRAILING_MARKERS: Final = re.compile(rf"(?:[ \t]*{MARKER.pattern})+[.]?", re.IGNORECASE)
_NO_END: Final = re.compile(
    r"(?:\b(?:[A-Z]|[Dd]r|[Mm]rs?|[Mm]s|[Ss]t|[Pp]rof|vs|e\.g|i\.e|cf|[Nn]o|approx|[Ff]ig)"
    r"|(?:^|\n)\s*\d{1,3})\.$"
)
_WORD: Final = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]+|[^\W_]+(?:[.,'’-][^\W_]+)*"
)
_CJK: Final = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")
_STOPWORDS: Final = frozenset(
    re.findall(
        r"\w+",
        """a about above after all also an and any are as at be because been before being below
        between both but by can could did do does doing down during each few for from further had
        has have having he her here hers him his how i if in into is it its itself just may me might
        more most must my no nor not of off on once only or other our out over own per same shall
        she should so some such than that the their them then there these they this those through
        to too under until up upon us very was we were what when where which while who whom whose
        why will with within would you your yes according answer answers passage passages
        question""",
    )
)


@dataclass(frozen=True, slots=True)
class Span:
    """A half-open range of code points.

    Attributes:
        start: begin.
        end: end (exclusive).
    """

    start: int
    end: int


def split_sentences(text: str) -> list[Span]:
    """Return the sentences of ``text`` in order, surrounding white space left out."""
    spans: list[Span] = []
    start = 0
    for match in _END.finditer(text):
        if match.start() < start or _NO_END.search(
            text[max(start, match.end() - 12) : match.end()]
        ):
            continue
        end = match.end()
        trailing = _TRAILING_MARKERS.match(text, end)
        if trailing is not None:
            end = trailing.end()
        _append_stripped(spans, text, start, end)
        start = end
    _append_stripped(spans, text, start, len(text))
    return spans


def content_words(text: str) -> frozenset[str]:
    """Return the words that carry meaning: NFKC, case folded, markers and stopwords left out.

    Runs of CJK characters count as their overlapping pairs (a lone character as itself).
    """
    words: set[str] = set()
    for run in _WORD.findall(unicodedata.normalize("NFKC", MARKER.sub(" ", text)).casefold()):
        if _CJK.match(run):
            words.update(run[idx : idx + 2] for idx in range(max(1, len(run) - 1)))
        elif run not in _STOPWORDS:
            words.add(run.replace("’", "'").removesuffix("'s"))
    return frozenset(words)


def find_markers(text: str) -> list[int]:
    """Return the passage numbers cited inline, in order, each once."""
    numbers = [
        int(number)
        for match in MARKER.finditer(text)
        for number in re.split(r"\s*[,;]\s*", match.group(1))
    ]
    return list(dict.fromkeys(numbers))


def _append_stripped(spans: list[Span], text: str, start: int, end: int) -> None:
    piece = text[start:end]
    stripped = piece.strip()
    if stripped:
        first = start + piece.index(stripped[0])
        spans.append(Span(first, first + len(stripped)))
