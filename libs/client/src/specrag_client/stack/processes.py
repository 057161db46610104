"""Starting one process of a stack and reading what it said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specrag_client.stack import tether
from specrag_client.stack.identity import ProcessIdentity
from specrag_client.stack.record import ProcessRecord

if TYPE_CHECKING:
    from specrag_client.stack.plan import ProcessSpec

_TAIL_BYTES: Final = 16 * 1024
_TAIL_LINES: Final = 12


class StackError(Exception):
    """The stack cannot start; ``str`` is one line, ``log_tail`` what the process said last."""

    def __init__(self, message: str, *, log_tail: str = "") -> None:
        """State what failed; ``log_tail`` may be empty."""
        super().__init__(message)
        self.log_tail = log_tail


class ChildProcess:
    """A process this process started."""

    def __init__(self, spec: ProcessSpec, log_file: Path, *, tethered: bool) -> None:
        """Start it, leading a session of its own, with its output in ``log_file``.

        Args:
            spec: name, command and environment.
            log_file: appended to.
            tethered: end it when this process dies, however that happens.

        Raises:
            StackError: the command cannot be run.
        """
        self.name = spec.name
        self.log_file = log_file
        command = [*_tether(), *spec.command] if tethered else list(spec.command)
        try:
            with log_file.open("ab") as log:
                self._popen = subprocess.Popen(  # noqa: S603 - the plan's own command line
                    command,
                    env=dict(spec.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            self.identity = ProcessIdentity.of(self._popen.pid)
        except OSError as exc:
            raise StackError(f"cannot start {spec.name}: {exc}") from exc

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; ``None`` while it runs."""
        return self._popen.poll()

    def kill(self) -> None:
        """Kill it with all it has started, and wait for its end."""
        self.identity.kill_session()
        self._popen.wait()

    def record(self, address: str) -> ProcessRecord:
        """Return what ``stack.json`` says about it."""
        return ProcessRecord(
            name=self.name,
            pid=self.identity.pid,
            start_mark=self.identity.start_mark,
            address=address,
            log=str(self.log_file),
        )

    def died_error(self) -> StackError:
        """Return the error for an end that was not asked for."""
        return StackError(
            f"{self.name} {describe_exit(self.exit_code)} while starting; log: {self.log_file}",
            log_tail=read_tail(self.log_file),
        )


def describe_exit(exit_code: int | None) -> str:
    """Return an exit code in words."""
    if exit_code is None:
        return "runs"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def read_tail(log_file: Path) -> str:
    """Return the last lines of a log; empty when there is none."""
    try:
        with log_file.open("rb") as log:
            log.seek(max(0, log_file.stat().st_size - _TAIL_BYTES))
            content = log.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
    return "\n".join(content.splitlines()[-_TAIL_LINES:])


def _tether() -> list[str]:
    return [sys.executable, "-I", "-S", str(Path(tether.__file__)), str(os.getpid())]
