"""OpenTelemetry traces: one provider a process, spans exported as JSON lines.

The batch processor writes in a thread of its own; :meth:`Telemetry.shut_down` flushes it, so that
after a drain every finished span is on disk. Exporters other than the file are added through
``exporters``.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SpanExporter,
    SpanExportResult,
)
from opentelemetry.trace import SpanKind, Status, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from opentelemetry.util.types import AttributeValue

    from specrag_common.runtime.span_names import SpanName

TRACER_NAME: Final = "specrag"
"""Instrumentation scope of every span."""

_EXPORT_DELAY_MS: Final = 1000


class JsonLinesSpanExporter(SpanExporter):
    """Appends each finished span to a file as one JSON object a line.

    Keys: name, trace_id, span_id, parent_id (or null), service, kind, start_ns, end_ns,
    attributes, status, status_message. Several processes may share the file: a batch is written
    by one append.
    """

    def __init__(self, path: Path) -> None:
        """Create the file's folder and open the file for appending."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the batch; the processor's own thread calls this."""
        lines = b"".join(json.dumps(span_to_dict(span)).encode() + b"\n" for span in spans)
        try:
            self._file.write(lines)
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


def span_to_dict(span: ReadableSpan) -> dict[str, Any]:
    """Return the JSON form of a finished span."""
    context = span.get_span_context()
    assert context is not None, "only recorded spans are exported"
    return {
        "name": span.name,
        "trace_id": trace.format_trace_id(context.trace_id),
        "span_id": trace.format_span_id(context.span_id),
        "parent_id": trace.format_span_id(span.parent.span_id) if span.parent else None,
        "service": span.resource.attributes.get(SERVICE_NAME),
        "kind": span.kind.name.lower(),
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "status": span.status.status_code.name,
        "status_message": span.status.description,
    }


class Telemetry:
    """Owns the tracer provider of one process; :meth:`shut_down` it last."""

    def __init__(self, service_name: str, exporters: Sequence[SpanExporter] = ()) -> None:
        """Make a provider whose spans go to every exporter; with none, spans are dropped."""
        self.provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: service_name}), shutdown_on_exit=False
        )
        for exporter in exporters:
            self.provider.add_span_processor(
                BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_DELAY_MS)
            )

    def install(self) -> None:
        """Make this the process's global provider, so that :func:`span` records to it."""
        trace.set_tracer_provider(self.provider)

    def shut_down(self) -> None:
        """Flush what is buffered and close the exporters. Blocks; call it off the loop."""
        self.provider.shutdown()


def set_up_telemetry(
    service_name: str, *, trace_file: Path | None = None, console: bool = False
) -> Telemetry:
    """Build and install the provider of this process."""
    exporters: list[SpanExporter] = []
    if trace_file is not None:
        exporters.append(JsonLinesSpanExporter(trace_file))
    if console:
        exporters.append(ConsoleSpanExporter())
    telemetry = Telemetry(service_name, exporters)
    telemetry.install()
    return telemetry


@contextmanager
def span(
    name: SpanName,
    attributes: Mapping[str, AttributeValue] | None = None,
    *,
    tracer: trace.Tracer | None = None,
) -> Iterator[trace.Span]:
    """Record a step as the current span; it ends, with the error if any, on every way out.

    Safe inside async generators: the former context is put back by value, so that closing the
    generator from another task does not fail to detach.
    """
    before = otel_context.get_current()
    step = (tracer or trace.get_tracer(TRACER_NAME)).start_span(
        name, kind=SpanKind.INTERNAL, attributes=attributes
    )
    otel_context.attach(trace.set_span_in_context(step, before))
    try:
        yield step
    except Exception as exc:
        step.set_status(Status(StatusCode.ERROR, type(exc).__name__))
        raise
    finally:
        otel_context.attach(before)
        step.end()


def current_trace_id() -> str | None:
    """Return the hex trace id of the current span, or ``None`` outside a trace."""
    span_context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(span_context.trace_id) if span_context.is_valid else None
