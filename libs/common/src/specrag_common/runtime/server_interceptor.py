"""The one server interceptor: errors, request id, deadline, span and access log of every rpc.

It serves all four rpc shapes, and for responses both handler styles (``yield`` and
``context.write``). Both are driven from one coroutine, so that whatever ends the rpc (error,
cancel, a client that left between two writes), the handler's generator is closed in the same task
and the span ends.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from specrag_common.runtime import call_context, deadlines
from specrag_common.runtime.error_status import from_rpc_error, trailing_metadata_of
from specrag_common.runtime.errors import DeadlineExceeded, InternalError, SpecragError, Unsupported
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.request_streams import RequestStream, RequestStreamContext
from specrag_common.runtime.rpc_spans import (
    PROPAGATOR,
    SERVER_FAULTS,
    end_rpc_span,
    rpc_attributes,
)
from specrag_common.runtime.span_names import SpanKey
from specrag_common.runtime.telemetry import TRACER_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    Behaviour = Callable[[Any, Context], Any]

UNOBSERVED_PREFIXES: Final = ("/grpc.health.", "/grpc.reflection.")
"""Probes and tools: neither counted, nor logged, nor traced."""

_log = get_logger(__name__)


@dataclass(slots=True)
class _ServedCall:
    """One rpc being served."""

    method: str
    context: Context
    request_id: str
    span: trace.Span
    started_s: float = field(default_factory=time.perf_counter)
    code: grpc.StatusCode = grpc.StatusCode.OK
    reason: str | None = None


class ServiceInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server; ``num_in_flight`` says how many rpcs are running."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        """Record spans with ``tracer``; the process's global provider when absent."""
        self._tracer = tracer or trace.get_tracer(TRACER_NAME)
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.num_in_flight = 0

    async def wait_idle(self) -> None:
        """Return once no rpc is running."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the wrapped handler of the method, or ``None`` for an unknown one."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(UNOBSERVED_PREFIXES):
            return handler
        original, wrapped = self._wrapped.get(method, (None, None))
        if original is not handler or wrapped is None:
            wrapped = self._wrap(handler, method)
            self._wrapped[method] = (handler, wrapped)
        return wrapped

    def _wrap(self, handler: Handler, method: str) -> Handler:
        behaviour, make = _shape_of(handler)
        run = _run_stream if handler.response_streaming else _run_unary

        async def serve(request: Any, context: Any) -> Any:
            if handler.request_streaming:
                context = RequestStreamContext(context)
                request = RequestStream(context)
            return await self._serve(
                method, context, functools.partial(run, behaviour, request, context)
            )

        wrapped: Handler = make(
            serve,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped

    async def _serve(
        self, method: str, context: Context, body: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        call = self._begin(method, context)
        try:
            try:
                response = await body()
            except Exception as exc:  # noqa: BLE001 - the edge: every error becomes a status
                await self._fail(call, exc)
            else:
                call.code = context.code() or grpc.StatusCode.OK
                _add_request_id(call)
                return response
        except asyncio.CancelledError:
            if not _is_own_cancellation():
                await self._fail(call, InternalError("an inner task was cancelled"))
            self._note_cancelled(call)
            raise
        finally:
            self._end(call)

    def _begin(self, method: str, context: Context) -> _ServedCall:
        self.num_in_flight += 1
        self._idle.clear()
        metadata = _text_metadata(context)
        deadlines.set_remaining(context.time_remaining())
        request_id = call_context.bind_request_id(metadata.get(call_context.REQUEST_ID_KEY))
        parent = PROPAGATOR.extract(metadata)
        span = self._tracer.start_span(
            method.lstrip("/"),
            context=parent,
            kind=SpanKind.SERVER,
            attributes={**rpc_attributes(method), SpanKey.REQUEST_ID: request_id},
        )
        # Never detached: the context belongs to this rpc's task and ends with it.
        otel_context.attach(trace.set_span_in_context(span, parent))
        context.set_trailing_metadata(((call_context.REQUEST_ID_KEY, request_id),))
        return _ServedCall(method=method, context=context, request_id=request_id, span=span)

    async def _fail(self, call: _ServedCall, exc: Exception) -> None:
        """End the rpc with the status of ``exc``; always raises."""
        if isinstance(exc, grpc.aio.AbortError):
            call.code = call.context.code() or grpc.StatusCode.UNKNOWN
            raise exc
        if _is_client_gone(exc):
            raise asyncio.CancelledError("the client left") from exc
        error = _as_specrag_error(exc, call)
        call.code, call.reason = error.status, error.reason
        trailing: tuple[tuple[str, str | bytes], ...] = (
            *trailing_metadata_of(error),
            (call_context.REQUEST_ID_KEY, call.request_id),
        )
        try:
            await call.context.abort(error.status, error.message, trailing)
        except grpc.aio.AbortError:
            raise
        except grpc.aio.BaseError as gone:
            raise asyncio.CancelledError("the client left") from gone

    def _note_cancelled(self, call: _ServedCall) -> None:
        is_late = deadlines.remaining_s() == 0.0
        call.code = grpc.StatusCode.DEADLINE_EXCEEDED if is_late else grpc.StatusCode.CANCELLED

    def _end(self, call: _ServedCall) -> None:
        self.num_in_flight -= 1
        if self.num_in_flight == 0:
            self._idle.set()
        _log.info(
            "rpc served",
            rpc_method=call.method.lstrip("/"),
            code=call.code.name,
            reason=call.reason,
            duration_ms=round((time.perf_counter() - call.started_s) * 1e3, 2),
            peer=call.context.peer(),
        )
        if call.reason is not None:
            call.span.set_attribute(SpanKey.ERROR_TYPE, call.reason)
        end_rpc_span(call.span, call.code, is_error=call.code in SERVER_FAULTS)


def _shape_of(handler: Handler) -> tuple[Behaviour, Callable[..., Handler]]:
    """Return the handler's function and the factory for its rpc shape."""
    shapes: dict[tuple[bool, bool], tuple[Any, Callable[..., Handler]]] = {
        (False, False): (handler.unary_unary, grpc.unary_unary_rpc_method_handler),
        (False, True): (handler.unary_stream, grpc.unary_stream_rpc_method_handler),
        (True, False): (handler.stream_unary, grpc.stream_unary_rpc_method_handler),
        (True, True): (handler.stream_stream, grpc.stream_stream_rpc_method_handler),
    }
    behaviour, make = shapes[handler.request_streaming, handler.response_streaming]
    is_async = inspect.iscoroutinefunction(behaviour) or inspect.isasyncgenfunction(behaviour)
    return (behaviour if is_async else _refuse), make


async def _refuse(_request: Any, _context: Context) -> None:
    """Stand in for a blocking function: the generated stub of a method nobody wrote."""
    raise Unsupported("this server does not implement the method (handlers are async functions)")


async def _run_unary(behaviour: Behaviour, request: Any, context: Context) -> Any:
    return await behaviour(request, context)


async def _run_stream(behaviour: Behaviour, request: Any, context: Context) -> None:
    if inspect.iscoroutinefunction(behaviour):
        await behaviour(request, context)
        return
    responses: AsyncIterator[Any] = behaviour(request, context)
    try:
        async for response in responses:
            await context.write(response)
    finally:
        await responses.aclose()  # type: ignore[attr-defined] # an async generator


def _is_own_cancellation() -> bool:
    """Tell a cancel of this rpc from one that leaked out of a task the handler awaited."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_client_gone(exc: Exception) -> bool:
    """Tell the failed write of a cancelled rpc; it may come before the cancellation itself."""
    is_grpc = isinstance(exc, grpc.aio.BaseError)
    return is_grpc and not isinstance(exc, grpc.aio.UsageError | grpc.aio.AbortError)


def _as_specrag_error(exc: Exception, call: _ServedCall) -> SpecragError:
    if isinstance(exc, SpecragError):
        if exc.status in SERVER_FAULTS:
            _log.warning("rpc failed", reason=exc.reason, error=exc.message)
        return exc
    if isinstance(exc, grpc.aio.AioRpcError):
        return from_rpc_error(exc)
    if isinstance(exc, TimeoutError) and deadlines.remaining_s() == 0.0:
        return DeadlineExceeded("the deadline of the request has passed")
    error_id = uuid.uuid4().hex[:8]
    _log.error("rpc crashed", rpc_method=call.method, error_id=error_id, exc_info=exc)
    return InternalError(f"internal error, id {error_id}", metadata={"error_id": error_id})


def _text_metadata(context: Context) -> dict[str, str]:
    return {
        key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)
    }


def _add_request_id(call: _ServedCall) -> None:
    """Put the request id back when the handler replaced the trailing metadata."""
    trailing = tuple(call.context.trailing_metadata() or ())
    if not any(key == call_context.REQUEST_ID_KEY for key, _ in trailing):
        call.context.set_trailing_metadata(
            (*trailing, (call_context.REQUEST_ID_KEY, call.request_id))
        )
