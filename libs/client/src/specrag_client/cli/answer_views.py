"""How ``ask`` shows an answer: JSON, JSON lines, plain text in a pipe.

A view is a context manager; an error that passes through it may be shown by it too, and goes on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, Self

from specrag_common.runtime.errors import SpecragError

from specrag_client.cli.output import print_json
from specrag_client.cli.terminal_view import TerminalView
from specrag_client.client import AnswerCollector
from specrag_client.events import Commit
from specrag_client.json_shapes import answer_object, error_object, event_object

if TYPE_CHECKING:
    from types import TracebackType
    from typing import TextIO

    from specrag_client.events import AnswerEvent


class AnswerView(Protocol):
    """Shows one answer."""

    wants_speculative: bool
    """Whether speculative and retract events are of use."""

    def __enter__(self) -> Self:
        """Begin."""

    def show(self, event: AnswerEvent) -> None:
        """Show the next event."""

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        """End; with an error if the answer broke off."""


def make_view(*, as_json: bool, as_events: bool, stdout: TextIO) -> AnswerView:
    """Return the view that was asked for, or the one that suits where stdout goes."""
    if as_json:
        return JsonView(stdout)
    if as_events:
        return EventLinesView(stdout)
    if stdout.isatty() and not TerminalView.is_dumb():
        return TerminalView()
    return PlainView(stdout)


class _StreamView:
    """What the views without a screen have in common."""

    wants_speculative = True

    def __init__(self, stdout: TextIO) -> None:
        """Write to ``stdout``."""
        self._stdout = stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        pass


class JsonView(_StreamView):
    """Prints one object at the end; nothing when the answer broke off."""

    def __init__(self, stdout: TextIO) -> None:
        """Write to ``stdout``."""
        super().__init__(stdout)
        self._collector = AnswerCollector()

    def show(self, event: AnswerEvent) -> None:
        """Keep the event."""
        self._collector.add(event)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if exc_type is None:
            print_json(answer_object(self._collector.result()), self._stdout, indent=2)


class EventLinesView(_StreamView):
    """Prints every event as one JSON line; an error is the last line."""

    def __init__(self, stdout: TextIO) -> None:
        """Write to ``stdout``."""
        super().__init__(stdout)
        self._last_seq = 0

    def show(self, event: AnswerEvent) -> None:
        """Print the event."""
        self._last_seq = event.seq
        print_json(event_object(event), self._stdout)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if isinstance(exc_val, SpecragError):
            print_json(error_object(exc_val, seq=self._last_seq + 1), self._stdout)


class PlainView(_StreamView):
    """Streams committed text and nothing else."""

    wants_speculative = False

    def __init__(self, stdout: TextIO) -> None:
        """Write to ``stdout``."""
        super().__init__(stdout)
        self._line_open = False
        self._collector = AnswerCollector()

    def show(self, event: AnswerEvent) -> None:
        """Write the text of a commit."""
        self._collector.add(event)
        if isinstance(event, Commit) and event.text:
            self._stdout.write(event.text)
            self._stdout.flush()
            self._line_open = not event.text.endswith("\n")

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if self._line_open and not isinstance(exc_val, BrokenPipeError):
            self._stdout.write("\n")
            self._stdout.flush()
        if exc_type is None:
            self._collector.result()
