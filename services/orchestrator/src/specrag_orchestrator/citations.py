"""Which passage a sentence of the answer rests on.

Two methods, named in each citation. INLINE: the model wrote the passage's number; only numbers of
passages that the target has read count, others are counted and never cited. LEXICAL: a sentence
without a valid number is attributed to the passage sentence that contains most of its content
words, if that share (``support``) is at least :data:`MIN_SUPPORT`. Words of the document's title
count as found: a title names what its sentences call "it". They do not suffice alone: the sentence
itself must hold :data:`MIN_OWN_SUPPORT`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from specrag_orchestrator.sentences import Span, content_words, find_markers, split_sentences

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_orchestrator.passages import SourcePassage

MIN_SUPPORT: Final = 0.6
"""Least share of a sentence's content words that a lexical citation needs in its source."""

MIN_OWN_SUPPORT: Final = 0.4
"""Of these, the least share in the source sentence itself, title left aside."""

_OPEN_MARKER: Final = re.compile(r"[\[【][\w\s,;]*\Z")


class CitationMethod(StrEnum):
    """How a citation was found."""

    INLINE = "inline"
    LEXICAL = "lexical"


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """A part of the answer rests on a passage.

    Attributes:
        passage: the passage.
        start: begin of the cited part of the answer, in code points.
        end: its end (exclusive).
        source_start: begin of the supporting sentence in the document's extracted text.
        source_end: its end (exclusive).
        support: share of the part's content words found in that sentence or the document's title,
            0 to 1.
        method: how it was found.
    """

    passage: SourcePassage
    start: int
    end: int
    source_start: int
    source_end: int
    support: float
    method: CitationMethod


@dataclass(frozen=True, slots=True)
class _SourceSentence:
    passage: SourcePassage
    span: Span
    words: frozenset[str]
    title_words: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Match:
    source: _SourceSentence
    own_support: float
    support: float
    overlap: int


class CitationFinder:
    """Attributes the sentences of one growing answer; each sentence once, when it is complete."""

    def __init__(self, passages: Sequence[SourcePassage], question: str = "") -> None:
        """Prepare the sources.

        Args:
            passages: what the target has read, best first; nothing else is ever cited.
            question: decides between equally supporting sentences.
        """
        self._sources = [
            _SourceSentence(
                passage,
                span,
                content_words(passage.text[span.start : span.end]),
                content_words(passage.title),
            )
            for passage in passages
            for span in split_sentences(passage.text) or [Span(0, 0)]
        ]
        self._numbers = {passage.number for passage in passages}
        self._question_words = content_words(question)
        self._num_done = 0
        self.num_unknown_markers = 0
        """Inline numbers that name no passage the target has read."""

    def update(self, text: str) -> list[Citation]:
        """Return the citations of sentences that ``text``, the committed answer, completes."""
        spans = self._pending_sentences(text)
        if not spans:
            return []
        last = text[spans[-1].start : spans[-1].end]
        is_marker_rest = _OPEN_MARKER.match(last) is not None
        return self._cite_all(text, spans[: -2 if is_marker_rest else -1])

    def finish(self, text: str) -> list[Citation]:
        """Return the citations of what is left of the final answer."""
        return self._cite_all(text, self._pending_sentences(text))

    def _pending_sentences(self, text: str) -> list[Span]:
        return [
            Span(span.start + self._num_done, span.end + self._num_done)
            for span in split_sentences(text[self._num_done :])
        ]

    def _cite_all(self, text: str, spans: Sequence[Span]) -> list[Citation]:
        if spans:
            self._num_done = spans[-1].end
        return [citation for span in spans for citation in self._cite(text, span)]

    def _cite(self, text: str, span: Span) -> list[Citation]:
        sentence = text[span.start : span.end]
        words = content_words(sentence)
        numbers = find_markers(sentence)
        known = [number for number in numbers if number in self._numbers]
        self.num_unknown_markers += len(numbers) - len(known)
        if known:
            matches = [self._best_match(words, number) for number in known]
            return [_build(span, match, CitationMethod.INLINE) for match in matches if match]
        match = self._best_match(words) if words else None
        if match is None or match.support < MIN_SUPPORT or match.own_support < MIN_OWN_SUPPORT:
            return []
        return [_build(span, match, CitationMethod.LEXICAL)]

    def _best_match(self, words: frozenset[str], number: int | None = None) -> _Match | None:
        """Return the best supporting sentence; of equals the one nearest the question."""
        matches = [
            _Match(
                source=source,
                own_support=_share(words, source.words),
                support=_share(words, source.words | source.title_words),
                overlap=len(self._question_words & source.words),
            )
            for source in self._sources
            if number is None or source.passage.number == number
        ]
        return max(
            matches,
            key=lambda match: (match.own_support + match.support, match.overlap),
            default=None,
        )


def _share(words: frozenset[str], found: frozenset[str]) -> float:
    return len(words & found) / len(words) if words else 0.0


def _build(span: Span, match: _Match, method: CitationMethod) -> Citation:
    passage = match.source.passage
    return Citation(
        passage=passage,
        start=span.start,
        end=span.end,
        source_start=passage.start_char + match.source.span.start,
        source_end=passage.start_char + match.source.span.end,
        support=match.support,
        method=method,
    )
