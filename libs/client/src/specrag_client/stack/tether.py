"""Runs a command that ends when its parent does: ``python tether.py PARENT_PID COMMAND …``.

The kernel sends SIGTERM on the parent's death (Linux only; elsewhere the command just runs), so a
killed launcher leaves nothing running. A file of its own, run by path, so that it starts in a few
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent and become the command."""
    parent_pid = int(sys.argv[1])
    command = sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:
            raise SystemExit(143)
    os.execvp(command[0], command)  # noqa: S606 - the launcher's own command line


if __name__ == "__main__":
    main()
