"""The child's side of :mod:`.worker`: ``python -m specrag_common.runtime.worker_child FD FD``.

The first descriptor is the connection, the second a pipe that the parent never writes to: its end
means that the parent is gone, however it went, and the child leaves at once, even in the middle of
a forward pass.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.worker_messages import ChildFailed, ChildStart

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_PARENT_GONE: Final = 3
"""Exit code of a child whose parent vanished."""


def main(argv: list[str]) -> int:
    """Serve one parent; returns the exit code."""
    connection_fd, lifeline_fd = int(argv[0]), int(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_leave_with_parent, args=(lifeline_fd,), daemon=True).start()
    with Connection(connection_fd) as connection:
        try:
            _run(connection)
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return 0
        except Exception as exc:
            connection.send(ChildFailed(f"{type(exc).__name__}: {exc}"))
            raise
    return 0


def _run(connection: Connection) -> None:
    start = connection.recv()
    assert isinstance(start, ChildStart), f"first message is {start!r}"
    sys.path[:] = start.import_path
    module, _, name = start.target.partition(":")
    function: Callable[..., None] = getattr(importlib.import_module(module), name)
    function(connection, *pickle.loads(start.pickled_args))  # noqa: S301 - from our own parent


def _leave_with_parent(lifeline_fd: int) -> None:
    os.read(lifeline_fd, 1)
    os._exit(EXIT_PARENT_GONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
