"""From errors to one line on stderr and an exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import grpc

from specrag_client.cli.screen_text import one_line

if TYPE_CHECKING:
    from specrag_common.runtime.errors import SpecragError

EXIT_BAD_INPUT: Final = 2
EXIT_SERVICE_ERROR: Final = 3
EXIT_INTERRUPTED: Final = 130
EXIT_TERMINATED: Final = 143

_CALLERS_FAULT: Final = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class CommandError(Exception):
    """A command cannot go on; ``str`` is the line for stderr."""

    def __init__(self, message: str, *, exit_code: int = EXIT_SERVICE_ERROR) -> None:
        """State the line and the exit code."""
        super().__init__(message)
        self.exit_code = exit_code


def exit_code_of(error: SpecragError) -> int:
    """Return 2 when another request would succeed, 3 when the service is at fault."""
    return EXIT_BAD_INPUT if error.status in _CALLERS_FAULT else EXIT_SERVICE_ERROR


def line_of(error: SpecragError) -> str:
    """Return an error of a service in one line, with when to try again if that is known."""
    message = one_line(error.message)
    if error.retry_delay_s is not None:
        message += f" (try again in {error.retry_delay_s:.1f} s)"
    elif error.retryable:
        message += " (may succeed when tried again)"
    return message


def print_error(message: str) -> None:
    """Print one line on stderr."""
    click.echo(f"error: {one_line(message)}", err=True)
