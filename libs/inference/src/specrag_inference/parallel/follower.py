"""A rank that repeats the passes rank 0 plans; body of a process of its own."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import traceback
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final

from specrag_inference.parallel.messages import (
    RankAlive,
    RankFailed,
    RankReady,
    RankReport,
    RankStart,
    RankStep,
)

if TYPE_CHECKING:
    from specrag_inference.step_runner import StepRunner

EXIT_LEADER_GONE: Final = 3
"""Exit code of a rank whose leader vanished."""

_REPORT_INTERVAL_S: Final = 1.0


def run_follower(connection: Connection, start: RankStart) -> None:
    """Load one share of the model, then run passes until rank 0 closes ``connection``.

    Never returns: the process leaves without waiting for collectives of ranks that may be gone.
    Signals meant for the service reach this process too; rank 0 decides when it ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_leave_with_leader, name="leader-watch", daemon=True).start()
    reports = _Reports(connection)
    reports.start()
    code = 0
    try:
        runner = _load_share(start)
        reports.send(RankReady())
        _serve(runner, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:  # noqa: BLE001 - rank 0 is told, and this process ends
        message = f"{type(error).__name__}: {error}"
        reports.send(RankFailed(message, traceback.format_exc()))
        code = 1
    logging.shutdown()
    os._exit(code)


def _load_share(start: RankStart) -> StepRunner:
    from specrag_inference.parallel.process_group import (  # noqa: PLC0415 - reports run before torch
        join_group,
        limit_collectives,
    )
    from specrag_inference.planned import load_follower_runner  # noqa: PLC0415 - as above

    join_group(start.place)
    runner = load_follower_runner(start.plan)
    limit_collectives()
    return runner


def _serve(runner: StepRunner, connection: Connection) -> None:
    while True:
        message: RankStep = pickle.loads(connection.recv_bytes())  # noqa: S301 - from rank 0
        for source, destination in message.copies:
            runner.copy_slots(source, destination)
        runner.execute(message.step)


def _leave_with_leader() -> None:
    leader = parent_process()
    assert leader is not None, "a follower is spawned by rank 0"
    wait([leader.sentinel])
    os._exit(EXIT_LEADER_GONE)


class _Reports:
    """What this rank says; a thread says every second that it is alive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="rank-reports", daemon=True).start()

    def send(self, report: RankReport) -> None:
        with self._lock:
            try:
                self._connection.send(report)
            except OSError:
                self._stopped.set()  # rank 0 is gone, and this process goes with it

    def _run(self) -> None:
        while not self._stopped.wait(_REPORT_INTERVAL_S):
            self.send(RankAlive())
