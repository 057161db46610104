"""Telling a process apart from another one that was given its number later."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process: its number, and when it started.

    Attributes:
        pid: process number; numbers are given again.
        start_mark: boot and start time; equal marks and numbers mean the same process, whatever
            happens to the clock.
    """

    pid: int
    start_mark: str

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of a running process.

        Raises:
            ProcessLookupError: no such process.
        """
        mark = _start_mark(pid)
        if mark is None:
            raise ProcessLookupError(f"no process {pid}")
        return cls(pid, mark)

    def is_alive(self) -> bool:
        """Tell whether this very process still runs; a zombie without threads does not."""
        return _start_mark(self.pid) == self.start_mark and not _is_over(self.pid)

    def send(self, signal_number: signal.Signals) -> None:
        """Signal the process if it is alive."""
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal_number)

    def session_members(self) -> list[int]:
        """Return the living processes of the session this process leads or led, itself left out.

        A session id is not given again while the session has members, so members of an ended
        leader's session are its own unless another process now bears its number.
        """
        current = _start_mark(self.pid)
        if current is not None and current != self.start_mark:
            return []
        return [pid for pid in psutil.pids() if pid != self.pid and _session_of(pid) == self.pid]

    def kill_session(self) -> None:
        """Kill the process, if alive, and all other members of its session."""
        members = self.session_members()
        self.send(signal.SIGKILL)
        for pid in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_over(pid: int) -> bool:
    """Tell whether a process is gone, or a zombie that only waits for its parent to notice.

    One whose main thread has ended while others still run holds its files and locks.
    """
    try:
        process = psutil.Process(pid)
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.Error:
        return True


def _session_of(pid: int) -> int | None:
    try:
        return None if _is_over(pid) else os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return None


def _start_mark(pid: int) -> str | None:
    if sys.platform != "linux":
        try:
            return f"{psutil.Process(pid).create_time():.2f}"
        except psutil.Error:
            return None
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = _BOOT_ID_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return None
    # Fields after the command, which stands in brackets and may hold anything: the 20th is the
    # start time in clock ticks since boot.
    ticks = stat.rpartition(")")[2].split()[19]
    return f"{boot}:{ticks}"
