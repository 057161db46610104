"""An answer on a terminal: committed text plain, speculative text dim until it stands or goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specrag_client.answer_text import AnswerText
from specrag_client.cli.answer_summary import citation_lines, stats_lines
from specrag_client.cli.screen_text import printable
from specrag_client.cli.wrapping import Line, wrap_lines
from specrag_client.events import Citation, Finished, RetrievalDone

if TYPE_CHECKING:
    from types import TracebackType

    from specrag_client.events import AnswerEvent

_SPECULATIVE: Final = "dim"
_NOTE: Final = "dim italic"


class TerminalView:
    """Shows one answer.

    Lines that hold only committed text, and end in it, are printed for good and scroll away like
    any output; only the lines after them are redrawn.
    """

    wants_speculative = True

    def __init__(self, console: Console | None = None) -> None:
        """Draw on ``console``; on stdout when absent."""
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False)
        self._text = AnswerText()
        self._printed = 0
        self._note = "searching…"
        self._retrieval: RetrievalDone | None = None
        self._citations: list[Citation] = []
        self._finished: Finished | None = None

    @staticmethod
    def is_dumb() -> bool:
        """Tell whether the terminal cannot move its cursor."""
        return Console().is_dumb_terminal

    def __enter__(self) -> Self:
        self._live.start()
        self._draw()
        return self

    def show(self, event: AnswerEvent) -> None:
        """Bring the screen up to date with the event."""
        match event:
            case RetrievalDone():
                self._retrieval = event
                self._note = f"reading {len(event.passages)} passages…"
            case Citation():
                self._citations.append(event)
                return
            case Finished():
                self._finished = event
                return
            case _:
                self._text.apply(event)
        self._draw()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        self._note = ""
        self._text.retract(len(self._text.committed))
        self._draw()
        self._live.stop()
        if exc_type is None and self._finished is not None:
            self._print_summary(self._finished)

    def _draw(self) -> None:
        self._print_settled_lines()
        self._live.update(self._open_lines(), refresh=True)

    def _print_settled_lines(self) -> None:
        settled = self._text.committed[self._printed :]
        lines = wrap_lines(settled, self._width)
        for line in lines[:-1]:
            self._console.print(_line_text(settled, line), no_wrap=True, overflow="ignore")
        self._printed += lines[-1].start

    def _open_lines(self) -> Text:
        shown = self._text.text[self._printed :]
        if not shown and not self._printed:
            return Text(self._note, style=_NOTE)
        num_committed = len(self._text.committed) - self._printed
        lines = wrap_lines(shown, self._width)[-self._max_open_lines :]
        drawn = Text("\n").join(_line_text(shown, line, num_committed) for line in lines)
        drawn.no_wrap = True
        drawn.overflow = "ignore"
        return drawn

    @property
    def _width(self) -> int:
        """Cells a line may take: one is left free, so that no terminal breaks it once more."""
        return max(1, self._console.width - 1)

    @property
    def _max_open_lines(self) -> int:
        """Lines that can be redrawn: those above the screen's top cannot."""
        return max(1, self._console.height - 1)

    def _print_summary(self, finished: Finished) -> None:
        if not finished.answer:
            self._console.print(Text("(the answer is empty)", style=_NOTE))
        self._console.print()
        assert self._retrieval is not None, "an answer begins with its passages"
        for line in citation_lines(self._citations, finished.answer, self._width):
            self._console.print(line, no_wrap=True, overflow="ignore")
        for line in stats_lines(finished, self._retrieval):
            self._console.print(line)


def _line_text(text: str, line: Line, num_committed: int | None = None) -> Text:
    """Return one line; code points from ``num_committed`` on are speculative."""
    committed_end = line.end if num_committed is None else min(line.end, num_committed)
    committed_end = max(line.start, committed_end)
    visible_end = line.start + len(text[line.start : line.end].rstrip(" "))
    drawn = Text(printable(text[line.start : min(committed_end, visible_end)]))
    if visible_end > committed_end:
        drawn.append(printable(text[committed_end:visible_end]), style=_SPECULATIVE)
    return drawn
