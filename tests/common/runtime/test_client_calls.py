from __future__ import annotations

import asyncio
import gc
import itertools
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry import trace
from specrag_common.runtime import call_context, deadlines
from specrag_common.runtime.client_calls import cancelling
from specrag_common.runtime.errors import (
    Capacity,
    DeadlineExceeded,
    SpecragError,
    UpstreamUnavailable,
)
from specrag_common.runtime.span_names import SpanKey

from tests.common.runtime.serving import Recorder, Serve, make_recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


async def echo_all(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


async def tell_time_left(_request: bytes, _context: Any) -> bytes:
    return str(deadlines.remaining_s()).encode()


async def test_deadline_shrinks_over_two_hops_and_never_grows(serve: Serve) -> None:
    last = await serve({"Tell": ("unary_unary", tell_time_left)})

    async def ask_on(_request: bytes, _context: Any) -> bytes:
        await asyncio.sleep(0.3)
        answer: bytes = await last.call("unary_unary", "Tell")(b"", timeout=60.0)
        return answer

    first = await serve({"AskOn": ("unary_unary", ask_on)})

    left = float(await first.call("unary_unary", "AskOn")(b"", timeout=5.0))

    assert 4.0 < left <= 4.75  # the wire rounds up by some ms


async def test_own_timeout_holds_when_it_is_less_than_what_is_left(serve: Serve) -> None:
    last = await serve({"Tell": ("unary_unary", tell_time_left)})

    async def ask_on(_request: bytes, _context: Any) -> bytes:
        answer: bytes = await last.call("unary_unary", "Tell")(b"", timeout=2.0)
        return answer

    first = await serve({"AskOn": ("unary_unary", ask_on)})

    left = float(await first.call("unary_unary", "AskOn")(b"", timeout=50.0))

    assert left <= 2.05  # the wire rounds up by some ms


async def test_every_call_has_a_deadline_even_when_nobody_gave_one(serve: Serve) -> None:
    running = await serve({"Tell": ("unary_unary", tell_time_left)}, unary_timeout_s=11.0)

    left = float(await running.call("unary_unary", "Tell")(b""))

    assert 10.0 < left <= 11.1


async def test_slow_peer_ends_at_the_deadline_of_the_first_caller(serve: Serve) -> None:
    async def sleep(_request: bytes, _context: Any) -> bytes:
        await asyncio.sleep(30)
        return b""

    last = await serve({"Sleep": ("unary_unary", sleep)})

    async def ask_on(request: bytes, _context: Any) -> bytes:
        answer: bytes = await last.call("unary_unary", "Sleep")(request)
        return answer

    first = await serve({"AskOn": ("unary_unary", ask_on)})

    with pytest.raises(DeadlineExceeded):
        await first.call("unary_unary", "AskOn")(b"", timeout=0.3)
    await asyncio.sleep(0.2)

    assert (first.server.num_in_flight, last.server.num_in_flight) == (0, 0)


async def test_request_id_travels_over_two_hops(serve: Serve) -> None:
    async def tell(_request: bytes, _context: Any) -> bytes:
        return (call_context.request_id() or "").encode()

    last = await serve({"Tell": ("unary_unary", tell)})

    async def ask_on(request: bytes, _context: Any) -> bytes:
        answer: bytes = await last.call("unary_unary", "Tell")(request)
        return answer

    first = await serve({"AskOn": ("unary_unary", ask_on)})
    call = first.call("unary_unary", "AskOn")(b"", metadata=(("x-request-id", "trip-9"),))

    assert await call == b"trip-9"


async def test_one_question_is_one_trace_over_two_services(
    serve: Serve, recorder: Recorder
) -> None:
    second_recorder = make_recorder("second")
    last = await serve({"Echo": ("stream_stream", echo_all)}, recorder=second_recorder)

    async def ask_on(request: bytes, _context: Any) -> AsyncIterator[bytes]:
        with cancelling(last.call("stream_stream", "Echo")()) as call:
            for byte in request:
                await call.write(bytes([byte]))
                yield await call.read()

    first = await serve({"AskOn": ("unary_stream", ask_on)}, recorder=recorder)
    with trace.use_span(recorder.tracer.start_span("question"), end_on_exit=True):
        answer = [one async for one in first.call("unary_stream", "AskOn")(b"abc")]
    await asyncio.sleep(0.05)

    assert answer == [b"a", b"b", b"c"]
    by_kind: dict[tuple[Any, ...], Any] = {
        (
            span.resource.attributes["service.name"],
            span.name.rpartition("/")[2],
            span.kind.name,
        ): span
        for span in (
            *recorder.exporter.get_finished_spans(),
            *second_recorder.exporter.get_finished_spans(),
        )
    }
    chain = [
        ("under-test", "question", "INTERNAL"),
        ("under-test", "AskOn", "CLIENT"),
        ("under-test", "AskOn", "SERVER"),
        ("second", "Echo", "CLIENT"),
        ("second", "Echo", "SERVER"),
    ]
    assert set(by_kind) == set(chain)
    for parent, child in itertools.pairwise(chain):
        assert by_kind[child].parent.span_id == by_kind[parent].context.span_id
    assert len({span.context.trace_id for span in by_kind.values()}) == 1


async def test_messages_before_an_error_are_all_delivered(serve: Serve) -> None:
    async def fail_late(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        for _ in range(50):
            yield b"m" * 100
        raise Capacity("enough")

    running = await serve({"FailLate": ("unary_stream", fail_late)})
    call = running.call("unary_stream", "FailLate")(b"")
    await asyncio.sleep(0.1)
    received: list[bytes] = []

    with pytest.raises(Capacity):
        await read_into(received, call)

    assert len(received) == 50


async def read_into(received: list[bytes], call: Any) -> None:
    async for message in call:
        received.append(message)  # noqa: PERF401 - what came before an error counts


async def test_writing_to_a_stream_the_peer_ended_raises_its_error(serve: Serve) -> None:
    async def refuse(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)
        raise Capacity("no more", retry_delay_s=1.0)

    async def finish(requests: AsyncIterator[bytes], _context: Any) -> AsyncIterator[bytes]:
        yield await anext(requests)

    running = await serve(
        {"Refuse": ("stream_stream", refuse), "Finish": ("stream_stream", finish)}
    )

    with pytest.raises(Capacity):
        await write_until_refused(running.call("stream_stream", "Refuse")())
    with pytest.raises(UpstreamUnavailable, match="ended the stream"):
        await write_until_refused(running.call("stream_stream", "Finish")())


async def write_until_refused(call: Any) -> None:
    await call.write(b"one")
    await call.read()
    for _ in range(100):
        await call.write(b"more")
        await asyncio.sleep(0.005)


async def test_server_that_is_not_there_is_upstream_unavailable(serve: Serve) -> None:
    running = await serve({"Echo": ("stream_stream", echo_all)})
    await running.server.drain()

    with pytest.raises(UpstreamUnavailable):
        await running.call("unary_unary", "Any")(b"", timeout=2.0)


async def test_cancelled_task_sees_cancelled_error_and_cancels_the_call(serve: Serve) -> None:
    running = await serve({"Echo": ("stream_stream", echo_all)})
    call = running.call("stream_stream", "Echo")()
    await call.write(b"a")
    await call.read()
    reading = asyncio.create_task(call.read())
    await asyncio.sleep(0.01)

    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.sleep(0.05)
    assert running.server.num_in_flight == 0


async def test_abandoned_stream_is_cancelled_and_its_span_ends(
    serve: Serve, recorder: Recorder
) -> None:
    running = await serve({"Echo": ("stream_stream", echo_all)}, recorder=recorder)
    call = running.call("stream_stream", "Echo")()
    await call.write(b"a")
    await call.read()

    del call
    gc.collect()
    await asyncio.sleep(0.05)

    assert running.server.num_in_flight == 0
    kinds = {span.kind.name: span for span in recorder.named("Echo")}
    assert kinds["CLIENT"].attributes[SpanKey.RPC_STATUS_CODE] == "CANCELLED"
    assert kinds["SERVER"].attributes[SpanKey.RPC_STATUS_CODE] == "CANCELLED"


async def test_failed_unary_call_marks_its_client_span(serve: Serve, recorder: Recorder) -> None:
    async def fail(_request: bytes, _context: Any) -> bytes:
        raise Capacity("full")

    running = await serve({"Fail": ("unary_unary", fail)}, recorder=recorder)

    with pytest.raises(SpecragError):
        await running.call("unary_unary", "Fail")(b"")
    await asyncio.sleep(0.02)

    client = next(span for span in recorder.named("Fail") if span.kind.name == "CLIENT")
    assert client.attributes[SpanKey.RPC_STATUS_CODE] == "RESOURCE_EXHAUSTED"
    assert client.status.status_code.name == "ERROR"


async def test_read_returns_eof_after_the_last_message(serve: Serve) -> None:
    running = await serve({"Echo": ("stream_stream", echo_all)})
    call = running.call("stream_stream", "Echo")()
    await call.write(b"a")
    await call.done_writing()

    assert await call.read() == b"a"
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
