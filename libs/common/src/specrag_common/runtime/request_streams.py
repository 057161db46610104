"""Request streams that tell a half-close from a client that left.

grpc.aio reports both as the end of the stream; for a cancelled rpc the ``CancelledError`` often
comes a moment later (in half of 400 cancels measured). A handler would take an upload that broke
off for a complete one. Here the end is believed only after the cancellation had its chance.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Self

import grpc

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]

_SETTLE_S: Final = 0.005


class RequestStreamContext:
    """A servicer context whose ``read`` tells the two ends apart."""

    def __init__(self, context: Context) -> None:
        """Wrap grpc's own context; everything but ``read`` is handed on."""
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def read(self) -> Any:
        """Return the next request, or ``grpc.aio.EOF`` after a half-close."""
        message = await self._context.read()
        if message is grpc.aio.EOF:
            await _settle(self._context)
        return message


class RequestStream:
    """An async iterator over the requests of one rpc.

    It reads by itself: grpc's own iterator is an async generator, which a handler that ends early
    leaves half-run for the garbage collector.
    """

    def __init__(self, context: RequestStreamContext) -> None:
        """Read from ``context``."""
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self._context.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message


async def _settle(context: Context) -> None:
    """Wait until a cancellation that came before the end of the stream has arrived.

    Sending the initial metadata passes through the same completion queue, behind the notice of
    the cancellation. Where it was sent before, a short sleep must do.
    """
    try:
        await context.send_initial_metadata(())
    except grpc.aio.UsageError:
        await asyncio.sleep(_SETTLE_S)
