from __future__ import annotations

import asyncio
import gc
import json
import logging
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import JsonLinesSpanExporter, Telemetry, span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.common.runtime.serving import Recorder


def test_finished_spans_are_on_disk_after_shut_down(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "spans.jsonl"
    telemetry = Telemetry("retriever", [JsonLinesSpanExporter(path)])
    tracer = telemetry.provider.get_tracer("test")

    with (
        span(SpanName.RETRIEVE, {SpanKey.NUM_PASSAGES: 4}, tracer=tracer),
        pytest.raises(KeyError),
        span(SpanName.EMBED, tracer=tracer),
    ):
        raise KeyError("secret")
    telemetry.shut_down()

    inner, outer = (json.loads(line) for line in path.read_text().splitlines())
    assert outer["name"] == "specrag.retrieve"
    assert outer["service"] == "retriever"
    assert outer["attributes"] == {"specrag.num_passages": 4}
    assert (outer["parent_id"], outer["status"]) == (None, "UNSET")
    assert inner["parent_id"] == outer["span_id"]
    assert inner["trace_id"] == outer["trace_id"]
    assert (inner["status"], inner["status_message"]) == ("ERROR", "KeyError")
    assert outer["start_ns"] <= inner["start_ns"] <= inner["end_ns"] <= outer["end_ns"]


def test_two_services_may_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    services = [Telemetry(name, [JsonLinesSpanExporter(path)]) for name in ("a", "b")]

    for telemetry in services:
        for _ in range(50):
            telemetry.provider.get_tracer("test").start_span("x").end()
    for telemetry in services:
        telemetry.shut_down()

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["service"] for line in lines) == ["a"] * 50 + ["b"] * 50


async def test_span_in_an_abandoned_generator_ends_and_detaches_silently(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    async def steps() -> AsyncIterator[int]:
        with span(SpanName.ROUND, tracer=recorder.tracer):
            for number in range(10):
                yield number

    async def take_one() -> None:
        async for _ in steps():
            return

    with caplog.at_level(logging.DEBUG, "opentelemetry"):
        for _ in range(100):
            await asyncio.create_task(take_one())
        gc.collect()
        await asyncio.sleep(0.01)

    assert caplog.records == []
    assert len(recorder.named("specrag.round")) == 100


def test_names_and_keys_are_declared_once() -> None:
    for names in (SpanName, SpanKey):
        values = [one.value for one in names.__members__.values()]
        assert len(set(values)) == len(values)
