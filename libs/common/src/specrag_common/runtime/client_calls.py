"""A channel whose calls carry deadline, request id and trace, and raise :class:`SpecragError`.

It wraps a plain ``grpc.aio`` channel and is given to generated stubs in its place. Client
interceptors are not used: on streams they swap the call object, and lose cancelled ones.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import SpanKind

from specrag_common.runtime import call_context, deadlines
from specrag_common.runtime.error_status import from_rpc_error
from specrag_common.runtime.errors import Cancelled, UpstreamUnavailable
from specrag_common.runtime.rpc_spans import PROPAGATOR, end_rpc_span, rpc_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from types import TracebackType

    Metadata = Iterable[tuple[str, str | bytes]]


class ServiceChannel(grpc.aio.Channel):
    """Owns a plain channel; close it with ``await channel.close()`` or ``async with``."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        unary_timeout_s: float,
        stream_timeout_s: float,
        tracer: trace.Tracer,
    ) -> None:
        """Wrap ``channel``; the timeouts hold for calls that state none of their own."""
        self._channel = channel
        self._unary_timeout_s = unary_timeout_s
        self._stream_timeout_s = stream_timeout_s
        self._tracer = tracer

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a unary method."""
        inner = self._channel.unary_unary(method, *args, **kwargs)
        return _Method(inner, method, _UnaryCall, self._unary_timeout_s, self._tracer)

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a server-streaming method."""
        inner = self._channel.unary_stream(method, *args, **kwargs)
        return _Method(inner, method, _StreamCall, self._stream_timeout_s, self._tracer)

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a client-streaming method."""
        inner = self._channel.stream_unary(method, *args, **kwargs)
        return _Method(inner, method, _UnaryCall, self._stream_timeout_s, self._tracer)

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Return the callable of a bidirectional method."""
        inner = self._channel.stream_stream(method, *args, **kwargs)
        return _Method(inner, method, _StreamCall, self._stream_timeout_s, self._tracer)

    async def close(self, grace: float | None = None) -> None:
        """Close the channel; running calls get ``grace`` seconds, then are cancelled."""
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:  # noqa: FBT001, FBT002, RUF100 - signature of grpc
        """Return the connectivity."""
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Return when the connectivity is another one."""
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Return when a backend is connected (and healthy, if health is watched)."""
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()


@contextmanager
def cancelling(call: Any) -> Iterator[Any]:
    """Cancel ``call`` on leaving the block, unless it is already over."""
    try:
        yield call
    finally:
        call.cancel()


class _Method:
    """One method of a channel."""

    def __init__(
        self,
        inner: Any,
        method: str,
        make_call: Callable[[Any, str], Any],
        default_timeout_s: float,
        tracer: trace.Tracer,
    ) -> None:
        self._inner = inner
        self._method = method
        self._make_call = make_call
        self._default_timeout_s = default_timeout_s
        self._tracer = tracer

    def __call__(
        self,
        *request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **options: Any,
    ) -> Any:
        span = self._tracer.start_span(
            self._method.lstrip("/"), kind=SpanKind.CLIENT, attributes=rpc_attributes(self._method)
        )
        call = self._inner(
            *request,
            timeout=deadlines.timeout(self._default_timeout_s if timeout is None else timeout),
            metadata=_outgoing_metadata(metadata, span),
            **options,
        )
        call.add_done_callback(lambda done: _end_span(span, done))
        return self._make_call(call, self._method)


def _outgoing_metadata(given: Metadata | None, span: trace.Span) -> tuple[Any, ...]:
    carrier: dict[str, str] = {}
    context = otel_context.get_current()
    if span.get_span_context().is_valid:
        context = trace.set_span_in_context(span, context)
    PROPAGATOR.inject(carrier, context)
    request_id = call_context.request_id()
    if request_id is not None:
        carrier[call_context.REQUEST_ID_KEY] = request_id
    own = tuple(given or ())
    taken = {key for key, _ in own}
    return (*own, *(item for item in carrier.items() if item[0] not in taken))


def _end_span(span: trace.Span, call: grpc.aio.Call) -> None:
    code = _final_code(call)
    end_rpc_span(span, code, is_error=code is not grpc.StatusCode.OK)


def _final_code(call: grpc.aio.Call) -> grpc.StatusCode:
    """Read the status of a finished call; its coroutine then ends without waiting."""
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as result:
        code: grpc.StatusCode = result.value
        return code
    coroutine.close()
    return grpc.StatusCode.UNKNOWN


class _KeepsStatus:
    """Stands before grpc's inner call, so that a failed write does not invent a status.

    grpc.aio answers a write that meets the end of the stream with INTERNAL, and the status the
    peer sent (full, not found, …) is lost. Without the invention it waits for the real one.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def set_internal_error(self, message: str) -> None:
        """Leave the status to the peer."""


class _Call:
    """What every call can do; errors leave as :class:`SpecragError`."""

    def __init__(self, call: Any, method: str) -> None:
        self._call = call
        self._method = method
        call._cython_call = _KeepsStatus(call._cython_call)

    def __del__(self) -> None:
        # grpc's own tasks keep its call alive: one that nobody can read any more would go on.
        if not self._call.done():
            self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, method=self._method) from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling() == 0:
                raise Cancelled(f"{self._method} was cancelled by this side") from exc
            raise

    async def wait_for_connection(self) -> None:
        """Return once the call reached a server."""
        with self._translated():
            await self._call.wait_for_connection()

    async def write(self, request: Any) -> None:
        """Send one message of a request stream."""
        with self._translated():
            try:
                await self._call.write(request)
            except asyncio.InvalidStateError as exc:
                await self._call._raise_for_status()
                raise UpstreamUnavailable(
                    f"{self._method}: the peer ended the stream", reason="STREAM_ENDED"
                ) from exc

    async def done_writing(self) -> None:
        """Half-close a request stream."""
        with self._translated():
            await self._call.done_writing()


class _UnaryCall(_Call):
    """A call with one response."""

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        with self._translated():
            return await self._call


class _StreamCall(_Call):
    """A call with a stream of responses, read by ``async for`` or ``read``."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self.read()
        if message is grpc.aio.EOF:
            raise StopAsyncIteration
        return message

    async def read(self) -> Any:
        """Return the next response, or ``grpc.aio.EOF``."""
        with self._translated():
            return await self._call.read()
