"""The asking side: a peer in a process group of its own, halted while it is not asked.

Several engines spin for a while when they have nothing to do; a halted one takes nothing from the
peer that is being measured.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

from bench.peers.child import Answer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

KILL_AFTER_S = 60.0


class PeerFailedError(Exception):
    """A peer ended or answered with something else than a reply; its log says why."""


class PeerProcess:
    """One peer; :meth:`close` it in ``finally``."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        working_directory: Path,
        can_be_halted: bool = True,
    ) -> None:
        """Start it; :meth:`wait_ready` before asking.

        Args:
            name: in tables and errors.
            command: argument vector.
            log: where its stderr goes.
            environment: all its variables.
            working_directory: where its module is found.
            can_be_halted: false for a peer whose connections would be lost.
        """
        self.name = name
        self.load_s = 0.0
        self._log = log
        self._can_be_halted = can_be_halted
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=dict(environment),
                cwd=working_directory,
                start_new_session=True,
                text=True,
            )

    def close(self) -> None:
        """End it, and all it has started."""
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def wait_ready(self) -> None:
        """Return once it has loaded, halted.

        Raises:
            PeerFailedError: it did not come up.
        """
        self.load_s = float(self._receive()["load_s"])
        self._halt()

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Let it run, have one request answered, halt it again.

        Raises:
            PeerFailedError: it ended.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = Answer(**self._receive())
        self._halt()
        return answer

    def _halt(self) -> None:
        if self._can_be_halted:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            record: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            raise PeerFailedError(f"{self.name} sent {line!r}; see {self._log}") from None
        return record
