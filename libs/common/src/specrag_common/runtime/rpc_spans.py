"""What client and server spans of an rpc have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import grpc
from opentelemetry.trace import Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from specrag_common.runtime.span_names import SpanKey

if TYPE_CHECKING:
    from opentelemetry.trace import Span

PROPAGATOR: Final = TraceContextTextMapPropagator()
"""W3C ``traceparent`` and ``tracestate`` in metadata."""

SERVER_FAULTS: Final = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that mark a server span as an error; others are the caller's doing."""


def rpc_attributes(method: str) -> dict[str, str]:
    """Return the attributes of a span for ``/package.Service/Method``."""
    return {SpanKey.RPC_SYSTEM: "grpc", SpanKey.RPC_METHOD: method.lstrip("/")}


def end_rpc_span(span: Span, code: grpc.StatusCode, *, is_error: bool) -> None:
    """Record the status and end the span."""
    span.set_attribute(SpanKey.RPC_STATUS_CODE, code.name)
    if is_error:
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end()
