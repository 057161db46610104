"""A gRPC server with health, reflection, limits, observation and an orderly end."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, Final, Self

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specrag_common.runtime.channels import KEEPALIVE_TIMEOUT_MS, MAX_RECEIVE_BYTES
from specrag_common.runtime.errors import FailedPrecondition
from specrag_common.runtime.health import HealthBoard
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.server_interceptor import ServiceInterceptor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from opentelemetry import trace

    from specrag_common.runtime.settings import ServiceSettings

MIN_PING_INTERVAL_MS: Final = 5_000
"""Clients may ping this often; Go clients ping every 10 s."""

MAX_CONNECTION_AGE_MS: Final = 300_000
"""Connections are renewed this often, so that clients see servers that came later."""

_FLUSH_S: Final = 1.0

_log = get_logger(__name__)


class GrpcServer:
    """One listening server. ``add_…Servicer_to_server(servicer, server.grpc)``, then ``start``."""

    def __init__(
        self,
        settings: ServiceSettings,
        *,
        services: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tracer: trace.Tracer | None = None,
    ) -> None:
        """Prepare a server; must be called inside the running event loop.

        Args:
            settings: address, port file and drain times.
            services: full names of the services, for health (not ready yet) and reflection.
            interceptors: run inside the observing one, in order (authentication, limits).
            tracer: records server spans; the process's global provider when absent.
        """
        self._settings = settings
        self._observer = ServiceInterceptor(tracer)
        self.health = HealthBoard()
        self.grpc: grpc.aio.Server = grpc.aio.server(
            interceptors=[self._observer, *interceptors], options=_server_options()
        )
        self.port = 0
        self._drained: asyncio.Task[None] | None = None
        for service in services:
            self.health.set_ready(service, ready=False)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    @property
    def num_in_flight(self) -> int:
        """How many rpcs are running, probes not counted."""
        return self._observer.num_in_flight

    def set_ready(self, service: str, *, ready: bool = True) -> None:
        """Set the health flag of one service."""
        self.health.set_ready(service, ready=ready)

    async def start(self) -> int:
        """Bind, listen, write the port file and return the port.

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            self.port = self.grpc.add_insecure_port(address)
        except RuntimeError as exc:
            raise FailedPrecondition(
                f"cannot listen on {address}: it is in use or not an address of this machine",
                reason="ADDRESS_UNAVAILABLE",
            ) from exc
        await self.grpc.start()
        if self._settings.port_file is not None:
            await asyncio.to_thread(_write_whole, self._settings.port_file, str(self.port))
        _log.info("listening", host=self._settings.host, port=self.port)
        return self.port

    async def drain(self) -> None:
        """Stop in order: NOT_SERVING, notice, no new calls, running ones finish, closed.

        Calls still running after ``drain_grace_s`` are cancelled. Further calls join the first.
        """
        if self._drained is None:
            self._drained = asyncio.create_task(self._drain())
        await asyncio.shield(self._drained)

    async def _drain(self) -> None:
        self.health.drain()
        await asyncio.sleep(self._settings.drain_notice_s)
        stopped = asyncio.create_task(self.grpc.stop(self._settings.drain_grace_s))
        idle = asyncio.create_task(self._observer.wait_idle())
        await asyncio.wait({stopped, idle}, return_when=asyncio.FIRST_COMPLETED)
        self.health.close()
        # Last statuses are still on their way. What is left then are tools' streams, which would
        # hold the server for the whole grace.
        await asyncio.wait({stopped}, timeout=_FLUSH_S)
        await self.grpc.stop(None)
        await stopped
        idle.cancel()
        _log.info("stopped", port=self.port)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.drain()


def _server_options() -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_connection_age_ms", MAX_CONNECTION_AGE_MS),
    ]


def _write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see nothing or everything."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(text)
    partial.replace(path)
