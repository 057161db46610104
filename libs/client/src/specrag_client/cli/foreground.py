"""Bringing a stack up, and staying with it until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any, Final

import click

from specrag_client.cli.failure import (
    EXIT_INTERRUPTED,
    EXIT_SERVICE_ERROR,
    print_error,
)
from specrag_client.cli.parameters import with_directory
from specrag_client.cli.stack_progress import StackProgress
from specrag_client.stack.launcher import StackLauncher
from specrag_client.stack.processes import StackError, describe_exit

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from specrag_client.stack.options import StackOptions
    from specrag_client.stack.record import StackRecord

_WATCH_INTERVAL_S: Final = 0.25
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


async def bring_up(options: StackOptions) -> int:
    """Start the stack; in the foreground, stay until a signal or until nothing runs any more.

    The first signal stops everything in order, the second kills everything.
    """
    signals = _Signals()
    started = time.monotonic()
    with StackProgress() as progress:
        launcher = StackLauncher(options, progress.report)
        try:
            record = await signals.interruptible(launcher.start())
        except StackError as exc:
            _show_log_tail(exc)
            print_error(str(exc))
            return EXIT_SERVICE_ERROR
        except asyncio.CancelledError:
            print_error("interrupted; everything was stopped")
            return EXIT_INTERRUPTED
    _greet(record, options, time.monotonic() - started)
    if not options.foreground:
        return 0
    return await _stay(launcher, signals)


async def _stay(launcher: StackLauncher, signals: _Signals) -> int:
    all_gone = False
    reported: set[str] = set()
    while not signals.received and not all_gone:
        codes = launcher.exit_codes()
        for name in sorted(codes.keys() - reported):
            click.echo(f"{name} {describe_exit(codes[name])}; the others go on", err=True)
        reported = set(codes)
        all_gone = len(codes) == len(launcher.record.processes)
        await signals.wait(_WATCH_INTERVAL_S)
    with StackProgress() as progress:
        launcher.report_to(progress.report)
        signals.rearm()
        try:
            killed = await signals.interruptible(launcher.stop())
        except asyncio.CancelledError:
            print_error("killed everything")
            return EXIT_INTERRUPTED
    click.echo("stopped" + (f"; had to be killed: {', '.join(killed)}" if killed else ""))
    return EXIT_SERVICE_ERROR if all_gone else 0


class _Signals:
    """Remembers signals; makes what runs cancellable by the next one."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._event.set)

    @property
    def received(self) -> bool:
        """Whether a signal came since the start or :meth:`rearm`."""
        return self._event.is_set()

    def rearm(self) -> None:
        """Forget what came."""
        self._event.clear()

    async def wait(self, timeout_s: float) -> None:
        """Return at a signal, or when the time is up."""
        waiting = asyncio.ensure_future(self._event.wait())
        await asyncio.wait({waiting}, timeout=timeout_s)
        waiting.cancel()

    async def interruptible(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run ``work``; a signal cancels it, and a further one cancels its clean-up too.

        Raises:
            asyncio.CancelledError: a signal came.
        """
        task = asyncio.ensure_future(work)
        while not task.done():
            waiting = asyncio.ensure_future(self._event.wait())
            await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            if self.received and not task.done():
                self.rearm()
                task.cancel()
        return await task


def _show_log_tail(error: StackError) -> None:
    for line in error.log_tail.splitlines():
        click.echo(f"  | {line}", err=True)


def _greet(record: StackRecord, options: StackOptions, seconds: float) -> None:
    directory = options.directory
    click.echo(f"specrag runs in {directory} ({seconds:.1f} s); endpoint {record.endpoint}")
    commands = ["specrag ingest FOLDER --collection NAME", 'specrag ask "…" --collection NAME']
    if not options.foreground:
        commands.append("specrag down")
    for command in commands:
        click.echo(f"  {with_directory(command, directory)}")
    if options.foreground:
        click.echo("  Ctrl-C stops it")
