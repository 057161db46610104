"""From process start to exit: event loop, signals, drain, closing order, exit code.

::

    def main() -> None:
        settings = load_settings(RetrieverSettings)
        run_service("retriever", settings, build)

    async def build(lifecycle: Lifecycle) -> None:
        store = await open_store(...)
        lifecycle.on_close(store.close)
        server = lifecycle.serve(GrpcServer(settings, services=[...]))
        add_RetrieverServiceServicer_to_server(Servicer(store), server.grpc)
        await server.start()
        server.set_ready("specrag.v1.RetrieverService")

``build`` returns once everything runs. SIGTERM or SIGINT drains the servers, closes the rest in
reverse order, flushes telemetry and exits 0; a second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from specrag_common.runtime.errors import SpecragError
from specrag_common.runtime.logs import get_logger, set_up_logs
from specrag_common.runtime.telemetry import set_up_telemetry

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from specrag_common.runtime.server import GrpcServer
    from specrag_common.runtime.settings import ServiceSettings

_log = get_logger(__name__)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_SECOND_SIGNAL = 130


class Lifecycle:
    """Knows what a process must drain and close, and why it stops."""

    def __init__(self) -> None:
        """Nothing to close yet; must be made inside the running loop."""
        self._stack = contextlib.AsyncExitStack()
        self._servers: list[GrpcServer] = []
        self._stop = asyncio.Event()
        self.exit_code = EXIT_OK

    def serve(self, server: GrpcServer) -> GrpcServer:
        """Drain ``server`` before anything is closed; returns it."""
        self._servers.append(server)
        return server

    def on_close(self, callback: Callable[[], Awaitable[Any]]) -> None:
        """Await ``callback()`` after the drain; the last registered comes first."""
        self._stack.push_async_callback(callback)

    def stop(self) -> None:
        """Begin the orderly end, as a SIGTERM does."""
        self._stop.set()

    def fail(self, reason: str) -> None:
        """Begin the orderly end with exit code 1: the process can no longer do its work.

        Health answers NOT_SERVING at once; running calls get their errors.
        """
        _log.error("service failed", reason=reason)
        self.exit_code = EXIT_FAILED
        for server in self._servers:
            server.health.drain()
        self._stop.set()

    async def wait_stop(self) -> None:
        """Return once :meth:`stop`, :meth:`fail` or a signal asked for the end."""
        await self._stop.wait()

    async def close(self) -> None:
        """Drain the servers together, then close the rest in reverse order."""
        drains = [server.drain() for server in self._servers]
        for result in await asyncio.gather(*drains, return_exceptions=True):
            if isinstance(result, BaseException):
                _log.error("drain failed", exc_info=result)
        await self._stack.aclose()


def run_service(
    name: str, settings: ServiceSettings, build: Callable[[Lifecycle], Awaitable[None]]
) -> NoReturn:
    """Run a service until it is told to stop, then exit the process. Never returns."""
    set_up_logs(name, level=settings.log_level, log_format=settings.log_format)
    telemetry = set_up_telemetry(
        name, trace_file=settings.trace_file, console=settings.trace_console
    )
    try:
        exit_code = uvloop.run(_run(build))
    finally:
        telemetry.shut_down()
    sys.stderr.flush()
    raise SystemExit(exit_code)


async def _run(build: Callable[[Lifecycle], Awaitable[None]]) -> int:
    lifecycle = Lifecycle()
    _handle_signals(lifecycle)
    try:
        if await _build_unless_stopped(lifecycle, build):
            await lifecycle.wait_stop()
    except SpecragError as exc:
        _log.error("cannot start", reason=exc.reason, error=exc.message)
        lifecycle.exit_code = EXIT_FAILED
    finally:
        await lifecycle.close()
    return lifecycle.exit_code


async def _build_unless_stopped(
    lifecycle: Lifecycle, build: Callable[[Lifecycle], Awaitable[None]]
) -> bool:
    """Run ``build``; a signal meanwhile cancels it. Returns whether it came to its end."""
    building = asyncio.ensure_future(build(lifecycle))
    stopping = asyncio.create_task(lifecycle.wait_stop())
    await asyncio.wait({building, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not building.done():
        building.cancel()
        await asyncio.wait({building})
        if not building.cancelled() and building.exception() is not None:
            _log.warning("stopped while starting", exc_info=building.exception())
        return False
    await building
    return True


def _handle_signals(lifecycle: Lifecycle) -> None:
    def handle(number: int) -> None:
        if lifecycle._stop.is_set():
            _log.warning("second signal, leaving at once", signal=number)
            os._exit(EXIT_SECOND_SIGNAL)
        _log.info("stopping", signal=number)
        lifecycle.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
