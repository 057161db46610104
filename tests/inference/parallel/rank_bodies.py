"""Bodies of processes that stand in for ranks: they report, and end as they are told."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

from specrag_inference.parallel.messages import RankFailed, RankReady

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def stay(connection: Connection) -> None:
    connection.send(RankReady())
    time.sleep(60)


def end_with_code_7(connection: Connection) -> None:
    connection.send(RankReady())
    os._exit(7)


def end_by_signal(connection: Connection) -> None:
    connection.send(RankReady())
    os.kill(os.getpid(), signal.SIGKILL)


def fail(connection: Connection) -> None:
    connection.send(RankFailed("RuntimeError: peer is gone", "Traceback …"))
    time.sleep(60)
