"""Replaying answer events into text.

An answer is shown as committed text followed by speculative text. Appending adds to the end,
retracting cuts speculative text off the end, committing makes text stand. All offsets count Unicode
code points, which is what ``len`` counts. Whatever the events, committed text only ever grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.runtime.errors import DataLoss

from specrag_client.events import Commit, Retract, Speculative

if TYPE_CHECKING:
    from specrag_client.events import AnswerEvent


class ReplayError(DataLoss):
    """The events contradict each other: they are not one answer's events in order."""


class AnswerText:
    """The text an answer has at one moment; starts empty."""

    def __init__(self) -> None:
        self._committed: list[str] = []
        self._committed_length = 0
        self._speculative = ""

    @property
    def committed(self) -> str:
        """Text that stands."""
        return "".join(self._committed)

    @property
    def speculative(self) -> str:
        """Text after the committed text that may still be taken back."""
        return self._speculative

    @property
    def text(self) -> str:
        """All that is shown: committed, then speculative text."""
        return self.committed + self._speculative

    def __len__(self) -> int:
        """Return the number of code points shown."""
        return self._committed_length + len(self._speculative)

    def append(self, offset: int, text: str) -> None:
        """Add speculative text at ``offset``, which must be the current end.

        Raises:
            ReplayError: the offset is not the current end.
        """
        if offset != len(self):
            raise ReplayError(
                f"speculative text at offset={offset}, but the text ends at {len(self)}"
            )
        self._speculative += text

    def retract(self, to_offset: int) -> None:
        """Cut the shown text to ``to_offset`` code points.

        Raises:
            ReplayError: the offset lies in committed text or beyond the end.
        """
        if not self._committed_length <= to_offset <= len(self):
            raise ReplayError(
                f"retract to_offset={to_offset} is outside the speculative text, "
                f"{self._committed_length} to {len(self)}"
            )
        self._speculative = self._speculative[: to_offset - self._committed_length]

    def commit(self, to_offset: int, text: str) -> None:
        """Make ``text`` stand from the last commit to ``to_offset``.

        Speculative text that equals it is confirmed; what lies beyond it stays speculative.

        Raises:
            ReplayError: the lengths do not fit, or shown text that was not retracted differs.
        """
        if to_offset != self._committed_length + len(text):
            raise ReplayError(
                f"commit of {len(text)} code points to_offset={to_offset}, "
                f"but the last commit ended at {self._committed_length}"
            )
        shown = self._speculative[: len(text)]
        if shown != text[: len(shown)]:
            raise ReplayError("commit differs from speculative text that was not retracted")
        self._committed.append(text)
        self._committed_length = to_offset
        self._speculative = self._speculative[len(text) :]

    def apply(self, event: AnswerEvent) -> bool:
        """Apply an event and tell whether it was one that speaks of text.

        Raises:
            ReplayError: the event does not fit what came before.
        """
        match event:
            case Speculative(offset=offset, text=text):
                self.append(offset, text)
            case Retract(to_offset=to_offset):
                self.retract(to_offset)
            case Commit(to_offset=to_offset, text=text):
                self.commit(to_offset, text)
            case _:
                return False
        return True
