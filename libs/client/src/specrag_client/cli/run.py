"""Running a command: nothing but its output and exit code leaves here, never a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TYPE_CHECKING, NoReturn

import click
from specrag_common.runtime.errors import SpecragError

from specrag_client.cli.app import app
from specrag_client.cli.failure import (
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_SERVICE_ERROR,
    CommandError,
    exit_code_of,
    line_of,
    print_error,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_EXIT_BROKEN_PIPE = 141


def main() -> NoReturn:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    raise SystemExit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code."""
    try:
        code = app.main(args=list(arguments), prog_name="specrag", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:  # What click makes of a broken pipe.
        return _report(BrokenPipeError())
    except Exception as exc:  # noqa: BLE001 - the last place: people get a line, not a traceback
        return _report(exc)
    return code if isinstance(code, int) else 0


def _report(exc: Exception) -> int:
    match exc:
        case click.ClickException():
            print_error(exc.format_message())
            return EXIT_BAD_INPUT
        case click.Abort():
            print_error("interrupted")
            return EXIT_INTERRUPTED
        case CommandError():
            print_error(str(exc))
            return exc.exit_code
        case SpecragError():
            print_error(line_of(exc))
            return exit_code_of(exc)
        case BrokenPipeError():
            _forget_stdout()
            return _EXIT_BROKEN_PIPE
        case _:
            print_error(f"unexpected {type(exc).__name__}: {exc}")
            return EXIT_SERVICE_ERROR


def _forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere: the reader has left."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
