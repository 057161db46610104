from __future__ import annotations

import asyncio

import pytest
from specrag_orchestrator.answering.events import AnswerEvent, EventStream
from specrag_orchestrator.answering.transcript import Commit


def commit(end: int) -> Commit:
    return Commit(to_offset=end, text="x")


async def collect(stream: EventStream) -> list[AnswerEvent]:
    return [event async for event in stream]


async def test_events_come_in_order_and_end() -> None:
    stream = EventStream()
    for end in range(1, 4):
        await stream.put(commit(end))
    stream.end()
    assert await collect(stream) == [commit(1), commit(2), commit(3)]
    assert stream.delivered_to_offset == 3


async def test_error_comes_behind_the_last_event() -> None:
    stream = EventStream()
    await stream.put(commit(1))
    stream.end(ValueError("broken"))
    events = aiter(stream)
    assert await anext(events) == commit(1)
    with pytest.raises(ValueError, match="broken"):
        await anext(events)


async def test_producer_waits_while_the_stream_is_full() -> None:
    stream = EventStream(max_queued=2)
    await stream.put(commit(1))
    await stream.put(commit(2))
    third = asyncio.create_task(stream.put(commit(3)))
    await asyncio.sleep(0)
    assert not third.done()
    events = aiter(stream)
    assert await anext(events) == commit(1)
    await asyncio.wait_for(third, 1)


async def test_reader_that_leaves_frees_a_waiting_producer_and_sees_no_more() -> None:
    stream = EventStream(max_queued=1)
    await stream.put(commit(1))
    second = asyncio.create_task(stream.put(commit(2)))
    await asyncio.sleep(0)
    stream.abandon()
    await asyncio.wait_for(second, 1)
    await stream.put(commit(3))
    stream.end()
    assert await collect(stream) == []
    assert stream.delivered_to_offset == 0


async def test_stream_ends_once() -> None:
    stream = EventStream()
    stream.end()
    stream.end_if_open(ValueError("too late"))
    assert await collect(stream) == []
