"""The answer's text as a stream of events: committed text stands, speculative text may go.

Pure: token ids in, events out. Invariants kept, whatever the chunking:

- applying the events in order gives exactly the detokenized ids, cut at the stop string;
- committed text is never taken back: an unfinished code point and the longest suffix that could
  begin a stop string wait until they are decided;
- text is retracted only when it is known to be wrong, and only the part that is. A commit that
  contradicts the shown speculation comes after the retraction of the wrong part; one that equals
  its beginning leaves the rest shown.

All offsets count code points of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.text.stops import StopMatcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.text.detokenizer import IncrementalDetokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Text that may still be taken back, appended at ``offset``, the end of what is shown."""

    offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retract:
    """Speculative text from ``to_offset`` on is taken back; never below the last commit."""

    to_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Text that stands: from the last commit to ``to_offset``."""

    to_offset: int
    text: str


TextEvent = Speculative | Retract | Commit


class TranscriptError(Exception):
    """The target contradicts text that it has already committed."""


class Transcript:
    """State of one answer's text; every method returns the events that it causes.

    After :meth:`finish` nothing more may be pushed.
    """

    def __init__(
        self,
        detokenizer: IncrementalDetokenizer,
        stops: Sequence[str] = (),
        *,
        min_tokens: int = 0,
        show_speculation: bool = True,
    ) -> None:
        """Begin an empty answer.

        Args:
            detokenizer: a fresh one; owned from here on.
            stops: strings that end the answer; what could begin one is held back.
            min_tokens: tokens of the answer in whose text no stop string begins that counts.
            show_speculation: without it, :meth:`speculate` does nothing.
        """
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._show_speculation = show_speculation
        self._num_unstopped_tokens = min_tokens
        self._num_unstopped_chars = 0
        self._text = ""
        self._num_committed = 0
        self._speculation = ""
        self._num_retracted = 0

    @property
    def text(self) -> str:
        """The committed text so far."""
        return self._text[: self._num_committed]

    @property
    def num_retracted_chars(self) -> int:
        """Code points taken back so far."""
        return self._num_retracted

    def commit(self, token_ids: Sequence[int]) -> list[TextEvent]:
        """Append committed tokens; the text they decide is committed."""
        self._push(token_ids)
        decided = self._find_decided(self._text, self._num_unstopped_chars)
        return self._commit_to(decided) + self._drop_contradicted()

    def speculate(self, token_ids: Sequence[int]) -> list[TextEvent]:
        """Show what the text would be if ``token_ids`` followed the committed tokens.

        Shown text is kept where it agrees, also beyond the end of ``token_ids``.
        """
        if not self._show_speculation:
            return []
        wanted = self._render(token_ids)
        if self._speculation.startswith(wanted):
            return []
        events = self._retract_to(_count_common(self._speculation, wanted))
        piece = wanted[len(self._speculation) :]
        events.append(Speculative(offset=self._num_committed + len(self._speculation), text=piece))
        self._speculation = wanted
        return events

    def finish(self, stop_text_length: int | None = None) -> list[TextEvent]:
        """Commit what was held back and take back what stayed speculative.

        Args:
            stop_text_length: code points of the whole answer that are kept, when a stop string
                ended it.

        Raises:
            TranscriptError: the stop lies inside text that was committed before.
        """
        self._text += self._detokenizer.finish()
        end = len(self._text) if stop_text_length is None else stop_text_length
        if not self._num_committed <= end <= len(self._text):
            raise TranscriptError(
                f"stop_text_length={end} is outside {self._num_committed} (committed) to "
                f"{len(self._text)} (decoded)"
            )
        self._text = self._text[:end]
        return self._commit_to(end) + self._retract_to(0)

    def finish_with(
        self, token_ids: Sequence[int], stop_text_length: int | None = None
    ) -> list[TextEvent]:
        """Append the last tokens and finish: a stop string may lie anywhere among them."""
        self._push(token_ids)
        return self.finish(stop_text_length)

    def _push(self, token_ids: Sequence[int]) -> None:
        """Append the text that committed tokens decide."""
        early = token_ids[: self._num_unstopped_tokens]
        self._num_unstopped_tokens -= len(early)
        self._text += self._detokenizer.push(early)
        if early:
            self._num_unstopped_chars = len(self._text)
        self._text += self._detokenizer.push(token_ids[len(early) :])

    def _render(self, token_ids: Sequence[int]) -> str:
        """Return what would be shown behind the commit if ``token_ids`` followed."""
        detokenizer = self._detokenizer.fork()
        num_early = self._num_unstopped_tokens
        text = self._text + detokenizer.push(token_ids[:num_early])
        stops_from = len(text) if num_early else self._num_unstopped_chars
        text += detokenizer.push(token_ids[num_early:])
        return text[self._num_committed : self._find_decided(text, stops_from)]

    def _find_decided(self, text: str, stops_from: int) -> int:
        """Return where a stop string begins that counts, or could begin; else the text's length."""
        search_from = max(stops_from, self._num_committed)
        match = self._matcher.find(text, search_from=search_from)
        if match is not None:
            return match.start
        return len(text) - self._matcher.held_back(text[search_from:])

    def _commit_to(self, end: int) -> list[TextEvent]:
        """Commit the text up to ``end``; confirm, extend or correct the shown speculation."""
        piece = self._text[self._num_committed : end]
        if not piece:
            return []
        num_common = _count_common(self._speculation, piece)
        confirmed = 0 < num_common == len(self._speculation) < len(piece)
        events = [] if num_common == len(piece) else self._retract_to(num_common)
        for part in (piece[:num_common], piece[num_common:]) if confirmed else (piece,):
            self._num_committed += len(part)
            events.append(Commit(to_offset=self._num_committed, text=part))
        self._speculation = self._speculation[len(piece) :]
        return events

    def _drop_contradicted(self) -> list[TextEvent]:
        """Retract speculation that text already decided, but still held back, contradicts."""
        pending = self._text[self._num_committed :]
        num_common = _count_common(self._speculation, pending)
        if num_common == min(len(self._speculation), len(pending)):
            return []
        return self._retract_to(num_common)

    def _retract_to(self, num_kept: int) -> list[TextEvent]:
        """Keep the first ``num_kept`` code points of the speculation."""
        num_dropped = len(self._speculation) - num_kept
        if num_dropped <= 0:
            return []
        self._speculation = self._speculation[:num_kept]
        self._num_retracted += num_dropped
        return [Retract(to_offset=self._num_committed + num_kept)]


def _count_common(one: str, other: str) -> int:
    """Return the number of leading code points that two strings share."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return length
    return next(idx for idx in range(length) if one[idx] != other[idx])
