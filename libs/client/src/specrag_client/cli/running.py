"""Running a command's coroutine so that signals end it in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, TypeVar

import click

from specrag_client.cli.failure import EXIT_TERMINATED, CommandError

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

_Result = TypeVar("_Result")


def run_async(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its end; Ctrl-C and SIGTERM cancel it, and its ``finally`` blocks run.

    Raises:
        click.Abort: Ctrl-C.
        CommandError: SIGTERM.
    """
    received: list[signal.Signals] = []

    async def guarded() -> _Result:
        task = asyncio.ensure_future(coroutine)
        loop = asyncio.get_running_loop()

        def stop(number: signal.Signals) -> None:
            received.append(number)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                loop.add_signal_handler(number, stop, number)
        return await task

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        if signal.SIGTERM in received:
            raise CommandError("terminated", exit_code=EXIT_TERMINATED) from None
        raise click.Abort from None
