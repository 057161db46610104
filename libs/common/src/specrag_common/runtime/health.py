"""``grpc.health.v1`` that cannot be stalled by a watcher and ends its watches on drain.

``""`` is the process; every further name is one service, ready or not. Load balancers that watch
would otherwise hold the server open for the whole drain.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthBoard:
    """Holds the ready flags and serves them; register it with ``add_HealthServicer_to_server``."""

    def __init__(self) -> None:
        """Start with the process serving and no services known."""
        self._ready: dict[str, bool] = {"": True}
        self._draining = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_ready(self, service: str, *, ready: bool) -> None:
        """Set one flag and tell its watchers; has no effect on what is served once draining."""
        self._ready[service] = ready
        self._notify()

    def is_ready(self, service: str) -> bool:
        """Tell whether a service answers SERVING now."""
        return not self._draining and self._ready.get(service, False)

    def drain(self) -> None:
        """Answer NOT_SERVING for everything from now on."""
        self._draining = True
        self._notify()

    def close(self) -> None:
        """End every watch."""
        self._closed = True
        self._notify()

    async def Check(  # noqa: N802 - name given by the protocol
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        """Answer the flag of one service; an unknown name is NOT_FOUND."""
        status = self._status_of(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"unknown health service {request.service!r}"
            )
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(  # noqa: N802 - name given by the protocol
        self,
        request: health_pb2.HealthCheckRequest,
        _context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Send the flag of one service now and at each change, until the server stops."""
        last: int | None = None
        while not self._closed:
            changed = self._changed
            status = self._status_of(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
                continue
            await changed.wait()

    async def List(  # noqa: N802 - name given by the protocol
        self,
        _request: health_pb2.HealthListRequest,
        _context: grpc.aio.ServicerContext[Any, Any],
    ) -> health_pb2.HealthListResponse:
        """Answer the flags of all services."""
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=self._status_of(name))
                for name in self._ready
            }
        )

    def _status_of(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        if service not in self._ready:
            return SERVICE_UNKNOWN
        return SERVING if self.is_ready(service) else NOT_SERVING

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
