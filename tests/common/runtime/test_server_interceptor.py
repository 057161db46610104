from __future__ import annotations

import asyncio
import gc
import logging
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from specrag.v1 import retriever_pb2, retriever_pb2_grpc
from specrag_common.runtime import call_context, deadlines
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import (
    Cancelled,
    Capacity,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidRequest,
    NotFound,
    Unsupported,
)
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.span_names import SpanKey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from specrag_common.runtime.settings import ServiceSettings

    from tests.common.runtime.serving import Behaviours, Recorder, Running, Serve


async def unary_unary(request: bytes, context: Any) -> bytes:
    fail_if_asked(request)
    return request.upper()


async def stream_unary(requests: AsyncIterator[bytes], context: Any) -> bytes:
    joined = b"".join([request async for request in requests])
    fail_if_asked(joined)
    return joined.upper()


async def stream_unary_reading(_requests: Any, context: Any) -> bytes:
    joined = b""
    while (request := await context.read()) is not grpc.aio.EOF:
        joined += request
    fail_if_asked(joined)
    return joined.upper()


async def unary_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for byte in request:
        yield bytes([byte]).upper()
    fail_if_asked(request)


async def unary_stream_writing(request: bytes, context: Any) -> None:
    for byte in request:
        await context.write(bytes([byte]).upper())
    fail_if_asked(request)


async def stream_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request.upper()
        fail_if_asked(request)


async def stream_stream_writing(_requests: Any, context: Any) -> None:
    while (request := await context.read()) is not grpc.aio.EOF:
        await context.write(request.upper())
        fail_if_asked(request)


def fail_if_asked(request: bytes) -> None:
    if request == b"bad":
        raise InvalidRequest("request", "is bad")
    if request == b"full":
        raise Capacity("full", retry_delay_s=2.5)
    if request == b"crash":
        raise KeyError("secret detail")


STYLES: Behaviours = {
    "UnaryUnary": ("unary_unary", unary_unary),
    "StreamUnary": ("stream_unary", stream_unary),
    "StreamUnaryReading": ("stream_unary", stream_unary_reading),
    "UnaryStream": ("unary_stream", unary_stream),
    "UnaryStreamWriting": ("unary_stream", unary_stream_writing),
    "StreamStream": ("stream_stream", stream_stream),
    "StreamStreamWriting": ("stream_stream", stream_stream_writing),
}

every_style = pytest.mark.parametrize("method", STYLES)


async def ask(running: Running, method: str, text: bytes) -> bytes:
    """Send ``text`` in one message and join whatever comes back."""
    shape = STYLES[method][0]
    callable_ = running.call(shape, method)
    request = callable_(text) if shape.startswith("unary") else callable_(one_by_one(text))
    if shape.endswith("unary"):
        answer: bytes = await request
        return answer
    return b"".join([message async for message in request])


async def one_by_one(text: bytes) -> AsyncIterator[bytes]:
    yield text


@every_style
async def test_every_rpc_shape_and_handler_style_answers(serve: Serve, method: str) -> None:
    running = await serve(STYLES)

    assert await ask(running, method, b"hello") == b"HELLO"


@every_style
async def test_typed_error_reaches_the_client_with_its_details(serve: Serve, method: str) -> None:
    running = await serve(STYLES)

    with pytest.raises(InvalidRequest) as bad:
        await ask(running, method, b"bad")
    with pytest.raises(Capacity) as full:
        await ask(running, method, b"full")

    assert bad.value.violations[0].field == "request"
    assert full.value.retry_delay_s == 2.5


@every_style
async def test_unexpected_exception_is_internal_with_an_id_and_logged_once(
    serve: Serve, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve(STYLES)

    with caplog.at_level(logging.DEBUG), pytest.raises(InternalError) as caught:
        await ask(running, method, b"crash")

    assert "secret detail" not in caught.value.message
    error_id = caught.value.metadata["error_id"]
    assert error_id in caught.value.message
    crashes = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(crashes) == 1


@every_style
async def test_status_and_duration_are_recorded_as_one_server_span(
    serve: Serve, recorder: Recorder, method: str
) -> None:
    running = await serve(STYLES, recorder=recorder)

    await ask(running, method, b"hello")
    with pytest.raises(InvalidRequest):
        await ask(running, method, b"bad")
    await asyncio.sleep(0.02)

    spans = [one for one in recorder.named("/" + method) if one.kind.name == "SERVER"]
    codes = [span.attributes[SpanKey.RPC_STATUS_CODE] for span in spans]
    assert codes == ["OK", "INVALID_ARGUMENT"]
    assert spans[1].attributes[SpanKey.ERROR_TYPE] == "INVALID_REQUEST"


async def test_abort_by_the_handler_keeps_its_status(serve: Serve) -> None:
    async def abort(_request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not now")
        return b""

    async def abort_stream(_request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"one"
        await context.abort(grpc.StatusCode.NOT_FOUND, "no more")

    running = await serve(
        {"Abort": ("unary_unary", abort), "AbortStream": ("unary_stream", abort_stream)}
    )

    with pytest.raises(FailedPrecondition, match="not now"):
        await running.call("unary_unary", "Abort")(b"")
    stream = running.call("unary_stream", "AbortStream")(b"")
    assert await stream.read() == b"one"
    with pytest.raises(NotFound, match="no more"):
        await stream.read()


async def test_unknown_method_is_unimplemented(serve: Serve) -> None:
    running = await serve(STYLES)

    with pytest.raises(Unsupported):
        await running.call("unary_unary", "Nothing")(b"")


async def test_request_id_goes_in_and_comes_back(serve: Serve) -> None:
    async def tell(_request: bytes, _context: Any) -> bytes:
        return (call_context.request_id() or "").encode()

    running = await serve({"Tell": ("unary_unary", tell)})
    method = running.call("unary_unary", "Tell")

    given = method(b"", metadata=(("x-request-id", "order-66"),))
    fresh = method(b"")
    forged = method(b"", metadata=(("x-request-id", "a b"),))

    assert await given == b"order-66"
    assert dict(await given.trailing_metadata())["x-request-id"] == "order-66"
    assert len(await fresh) == 32
    assert await forged != b"a b"


async def test_request_id_comes_back_with_an_error(serve: Serve) -> None:
    running = await serve(STYLES)
    call = running.call("unary_unary", "UnaryUnary")(b"bad", metadata=(("x-request-id", "r1"),))

    with pytest.raises(InvalidRequest):
        await call

    assert dict(await call.trailing_metadata())["x-request-id"] == "r1"


async def test_request_id_survives_trailing_metadata_of_the_handler(serve: Serve) -> None:
    async def trail(_request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("mine", "1"),))
        return b""

    running = await serve({"Trail": ("unary_unary", trail)})
    call = running.call("unary_unary", "Trail")(b"", metadata=(("x-request-id", "r2"),))
    await call

    trailing = dict(await call.trailing_metadata())
    assert (trailing["mine"], trailing["x-request-id"]) == ("1", "r2")


async def test_handlers_deadline_is_what_the_client_gave(serve: Serve) -> None:
    async def tell(_request: bytes, _context: Any) -> bytes:
        return str(deadlines.remaining_s()).encode()

    running = await serve({"Tell": ("unary_unary", tell)})

    left = float(await running.call("unary_unary", "Tell")(b"", timeout=7.0))

    assert 6.0 < left <= 7.05  # the wire rounds up by some ms


async def test_timeout_at_the_requests_deadline_is_deadline_exceeded(serve: Serve) -> None:
    seen: list[str] = []

    async def wait(_request: bytes, _context: Any) -> bytes:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise
        return b""

    running = await serve({"Wait": ("unary_unary", wait)})

    with pytest.raises(DeadlineExceeded):
        await running.call("unary_unary", "Wait")(b"", timeout=0.1)
    await asyncio.sleep(0.1)

    assert seen == ["cancelled"]


@pytest.mark.parametrize("method", ["UnaryStream", "UnaryStreamWriting"])
async def test_every_client_that_leaves_ends_its_handler_and_its_spans(
    serve: Serve, recorder: Recorder, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    closed = 0

    async def endless(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        nonlocal closed
        try:
            while True:
                yield b"x" * 100
                await asyncio.sleep(0)
        finally:
            closed += 1

    async def endless_writing(request: bytes, context: Any) -> None:
        async for message in endless(request, context):
            await context.write(message)

    behaviour = endless if method == "UnaryStream" else endless_writing
    running = await serve({method: ("unary_stream", behaviour)}, recorder=recorder)

    with caplog.at_level(logging.INFO):
        for _ in range(50):
            call = running.call("unary_stream", method)(b"")
            await call.read()
            call.cancel()
        await asyncio.sleep(0.2)
        gc.collect()
        await asyncio.sleep(0.05)

    assert running.server.num_in_flight == 0
    assert closed == 50
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    spans = recorder.named(method)
    assert len(spans) == 100
    assert {one.attributes[SpanKey.RPC_STATUS_CODE] for one in spans} == {"CANCELLED"}


@pytest.mark.parametrize("method", ["StreamUnary", "StreamUnaryReading"])
async def test_upload_that_breaks_off_is_never_taken_for_a_complete_one(
    serve: Serve, method: str
) -> None:
    outcomes: list[str] = []

    async def upload(requests: AsyncIterator[bytes], _context: Any) -> bytes:
        try:
            async for _ in requests:
                pass
        except asyncio.CancelledError:
            outcomes.append("broken off")
            raise
        outcomes.append("complete")
        return b""

    async def upload_reading(_requests: Any, context: Any) -> bytes:
        async def reading() -> AsyncIterator[bytes]:
            while (request := await context.read()) is not grpc.aio.EOF:
                yield request

        return await upload(reading(), context)

    behaviour = upload if method == "StreamUnary" else upload_reading
    running = await serve({method: ("stream_unary", behaviour)})

    for turn in range(100):
        call = running.call("stream_unary", method)()
        await call.write(b"part")
        await asyncio.sleep(0.002 * (turn % 2))
        call.cancel()
    await asyncio.sleep(0.3)

    assert set(outcomes) == {"broken off"}


async def test_cancellation_leaking_from_an_inner_task_is_an_error_not_silence(
    serve: Serve,
) -> None:
    async def leak(_request: bytes, _context: Any) -> bytes:
        inner = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(0)
        inner.cancel()
        await inner
        return b""

    running = await serve({"Leak": ("unary_unary", leak)})

    with pytest.raises(InternalError, match="inner task was cancelled"):
        await running.call("unary_unary", "Leak")(b"", timeout=3.0)


async def test_blocking_handler_is_unimplemented_for_every_shape(serve: Serve) -> None:
    def block(_request: Any, _context: Any) -> bytes:
        return b""

    shapes = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    running = await serve({shape: (shape, block) for shape in shapes})

    for shape in shapes:
        request = b"" if shape.startswith("unary") else one_by_one(b"")
        call = running.call(shape, shape)(request)
        with pytest.raises(Unsupported):
            await (call if shape.endswith("unary") else call.read())


async def test_generated_stubs_and_servicers_work_unchanged(
    settings: ServiceSettings,
) -> None:
    class Servicer(retriever_pb2_grpc.RetrieverServiceServicer):
        async def ListCollections(self, request: Any, context: Any) -> Any:  # noqa: N802
            raise Capacity("too many", retry_delay_s=1.0)

    server = GrpcServer(settings, services=["specrag.v1.RetrieverService"])
    servicer: Any = Servicer  # abstract for mypy: the other methods stay unwritten
    retriever_pb2_grpc.add_RetrieverServiceServicer_to_server(servicer(), server.grpc)
    async with server, open_channel(f"127.0.0.1:{server.port}") as channel:
        stub = retriever_pb2_grpc.RetrieverServiceStub(channel)

        with pytest.raises(Capacity):
            await stub.ListCollections(retriever_pb2.ListCollectionsRequest())
        with pytest.raises(Unsupported):
            await stub.Search(retriever_pb2.SearchRequest())


async def test_call_cancelled_by_this_side_raises_a_typed_error(serve: Serve) -> None:
    running = await serve(STYLES)
    call = running.call("stream_stream", "StreamStream")()
    await call.write(b"a")
    assert await call.read() == b"A"

    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.01)
    call.cancel()

    with pytest.raises(Cancelled):
        await reading
