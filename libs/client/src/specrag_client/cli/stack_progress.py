"""Showing what a stack waits for while it starts or stops."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import RenderableType


class StackProgress:
    """Draws one line a process on a terminal; elsewhere prints each change. On stderr."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on ``console``; on stderr when absent."""
        self._console = console or Console(stderr=True, highlight=False)
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._states: dict[str, tuple[str, float]] = {}
        self._started = time.monotonic()
        self._live = Live(
            console=self._console, get_renderable=self._table, transient=True, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        if self._draws:
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        if self._draws:
            self._live.stop()

    def report(self, name: str, state: str) -> None:
        """Take a change of state."""
        elapsed_s = time.monotonic() - self._started
        self._states[name] = (state, elapsed_s)
        if not self._draws:
            self._console.print(Text(f"{elapsed_s:6.1f} s  {name}: {state}"))

    def _table(self) -> RenderableType:
        now_s = time.monotonic() - self._started
        return Group(*(_row(name, *entry, now_s) for name, entry in self._states.items()))


def _row(name: str, state: str, since_s: float, now_s: float) -> Text:
    line = Text(f"{name:<14}")
    if state == "healthy":
        return line.append(f"{state} after {since_s:.1f} s", style="green")
    return line.append(f"{state} ({now_s:.0f} s)", style="yellow")
