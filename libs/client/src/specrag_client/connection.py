"""A connection to one service, the same for every client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from specrag_common.runtime.channels import open_channel

from specrag_client.addresses import parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from specrag_common.runtime.client_calls import ServiceChannel


class ServiceConnection:
    """Owns the channel to one service; use it as an async context manager.

    Every method of a subclass raises :class:`specrag_common.runtime.errors.SpecragError` when the
    service refuses or fails.
    """

    def __init__(self, endpoint: str, idempotent_methods: Sequence[str]) -> None:
        """Open a channel to ``HOST:PORT``; it connects on the first call.

        Args:
            endpoint: ``HOST:PORT``.
            idempotent_methods: ``package.Service/Method`` of calls that may be repeated.

        Raises:
            AddressError: the endpoint is no ``HOST:PORT``.
        """
        self._channel: ServiceChannel = open_channel(
            parse_address(endpoint), idempotent_methods=tuple(idempotent_methods)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the channel; whatever runs on it is cancelled everywhere."""
        await self._channel.close()
