"""Notices that a rank is gone or stuck, whatever rank 0 is doing meanwhile."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final

from specrag_inference.parallel.messages import RankFailed, RankReady, RankReport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.context import SpawnProcess

    from specrag_inference.parallel.messages import RankPlace

SILENCE_LIMIT_S: Final = 6.0
"""A follower reports every second; one that is silent this long is stuck."""

_LOGGER = logging.getLogger(__name__)

_ROUND_S: Final = 1.0

_SETTLING_S: Final = 0.5
"""A lost rank makes the others fail: they are heard too, then the cause is named."""


class RankLostError(RuntimeError):
    """A rank is gone, stuck or failed: the replica cannot go on."""


@dataclass(slots=True, kw_only=True)
class Follower:
    """A rank's process and what is known of it.

    Attributes:
        place: where it stands.
        process: it.
        connection: messages to it, reports from it.
        is_ready: whether its share is loaded.
        is_open: whether reports can still come.
        heard_at: when the last one came.
        failure: what it said of its own end.
        details: where its error was raised.
    """

    place: RankPlace
    process: SpawnProcess
    connection: Connection
    is_ready: bool = False
    is_open: bool = True
    heard_at: float = 0.0
    failure: str | None = None
    details: str = ""


class RankWatch:
    """Reads the followers' reports in a thread and judges whether all are alive.

    Attributes:
        followers: who is watched.
        lost: set once a follower is lost.
        reason: which, and how; empty before.
    """

    def __init__(self, followers: Sequence[Follower], on_loss: Callable[[str], None]) -> None:
        """Watch ``followers``; ``on_loss`` is called in the watching thread, at most once."""
        self.lost = threading.Event()
        self.reason = ""
        self.followers = followers
        self._on_loss = on_loss
        self._stopped = threading.Event()
        self._settled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what happens to followers after this is nobody's loss."""
        self._stopped.set()
        self._thread.join(_ROUND_S + _SETTLING_S + 1.0)

    def wait_ready(self) -> None:
        """Return once all followers are ready.

        Raises:
            RankLostError: one was lost before.
        """
        self._settled.wait()
        if self.lost.is_set():
            raise RankLostError(self.reason)

    def _run(self) -> None:
        last_round = time.monotonic()
        while not self._stopped.is_set():
            self._read_reports(_ROUND_S)
            now = time.monotonic()
            # A watch that was itself held up says nothing about the followers' silence.
            if now - last_round < 2 * _ROUND_S and any(self._is_lost(f) for f in self.followers):
                break
            last_round = now
            if all(follower.is_ready for follower in self.followers):
                self._settled.set()
        else:
            return
        settled_at = time.monotonic() + _SETTLING_S
        while time.monotonic() < settled_at:
            self._read_reports(_SETTLING_S / 5)
        if not self._stopped.is_set():
            self._report_loss()

    def _report_loss(self) -> None:
        self.reason = describe_loss(self.followers)
        self.lost.set()
        self._settled.set()
        for follower in self.followers:
            follower.process.kill()  # a stopped process would not notice that its leader is gone
        self._on_loss(self.reason)

    def _read_reports(self, timeout_s: float) -> None:
        followers = {f.connection: f for f in self.followers if f.is_open}
        if not followers:
            time.sleep(timeout_s)
        for connection in wait(list(followers), timeout_s):
            assert isinstance(connection, Connection)
            follower = followers[connection]
            try:
                report: RankReport = connection.recv()
            except (EOFError, OSError):
                follower.is_open = False
                continue
            follower.heard_at = time.monotonic()
            if isinstance(report, RankReady):
                follower.is_ready = True
            elif isinstance(report, RankFailed):
                follower.failure = report.message
                follower.details = report.details

    def _is_lost(self, follower: Follower) -> bool:
        return not follower.is_open or follower.failure is not None or is_silent(follower)


def is_silent(follower: Follower) -> bool:
    """Whether a follower that had loaded its share has not been heard of for too long."""
    return follower.is_ready and time.monotonic() - follower.heard_at > SILENCE_LIMIT_S


def describe_loss(followers: Sequence[Follower]) -> str:
    """Return which rank was lost and how, the cause before what follows from it.

    A rank that was killed or is stuck makes the others' collectives fail, so their own words are
    believed last.
    """
    for follower in followers:
        code = follower.process.exitcode
        if code is not None and code < 0:
            return f"{follower.place} was killed by {signal.Signals(-code).name}"
    for follower in followers:
        if follower.is_open and is_silent(follower):
            return f"{follower.place} is stuck: not heard of for {SILENCE_LIMIT_S:g} s"
    for follower in followers:
        if follower.failure is not None:
            _LOGGER.error("%s failed\n%s", follower.place, follower.details)
            return f"{follower.place} failed: {follower.failure}"
    ended = next(follower for follower in followers if not follower.is_open)
    return f"{ended.place} ended with exit code {ended.process.exitcode}"
