"""Builders of real servers whose handlers a test gives; messages are plain bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if TYPE_CHECKING:
    from specrag_common.runtime.client_calls import ServiceChannel
    from specrag_common.runtime.server import GrpcServer

SERVICE = "test.v1.TestService"

Behaviours = dict[str, tuple[str, Callable[..., Any]]]


@dataclass
class Recorder:
    """A service's spans, in memory."""

    exporter: InMemorySpanExporter
    provider: TracerProvider

    @property
    def tracer(self) -> Any:
        return self.provider.get_tracer("test")

    def named(self, suffix: str) -> list[Any]:
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if span.name.endswith(suffix)]


@dataclass
class Running:
    """A server and a channel to it."""

    server: GrpcServer
    channel: ServiceChannel

    def call(self, shape: str, method: str) -> Any:
        return getattr(self.channel, shape)(f"/{SERVICE}/{method}")


class Serve(Protocol):
    """Starts a server with the given behaviours and opens a channel to it."""

    async def __call__(
        self, behaviours: Behaviours, *, recorder: Recorder | None = None, **channel: Any
    ) -> Running: ...


def make_recorder(service: str) -> Recorder:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: service}), shutdown_on_exit=False
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Recorder(exporter, provider)


def add_behaviours(server: grpc.aio.Server, behaviours: Behaviours) -> None:
    handlers = {
        name: getattr(grpc, f"{shape}_rpc_method_handler")(
            behaviour, request_deserializer=bytes, response_serializer=bytes
        )
        for name, (shape, behaviour) in behaviours.items()
    }
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, handlers)])
