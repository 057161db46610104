"""Reading one trace out of the span files of a stack and drawing it as a tree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@dataclass(slots=True)
class SpanNode:
    """A finished span with the spans inside it, in the order they began.

    Attributes:
        span_id: its id.
        parent_id: the span it happened in; ``None`` at the root.
        name: what was done.
        service: who did it.
        start_ns: begin, in nanoseconds since 1970.
        end_ns: end.
        attributes: facts about it.
        failed: it ended by an error.
        children: spans inside it.
    """

    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool
    children: list[SpanNode] = field(default_factory=list)

    @property
    def duration_ms(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e6

    def walk(self) -> Iterator[SpanNode]:
        """Yield this span and all inside it, depth first."""
        yield self
        for child in self.children:
            yield from child.walk()


def read_trace(folder: Path, trace_id: str) -> list[SpanNode]:
    """Return the roots of one trace: spans whose parent is not on file, by start.

    Lines that are no spans (one is being written) are left out.
    """
    spans = {one.span_id: one for one in _spans_of(folder, trace_id)}
    roots: list[SpanNode] = []
    for span in sorted(spans.values(), key=lambda one: one.start_ns):
        parent = spans.get(span.parent_id or "")
        (roots if parent is None else parent.children).append(span)
    return roots


def services_of(roots: Iterable[SpanNode]) -> set[str]:
    """Return the services that took part in a trace."""
    return {span.service for root in roots for span in root.walk()}


def tree_lines(roots: Iterable[SpanNode], *, fold_over: int = 3) -> list[str]:
    """Return a trace as indented lines; runs of more than ``fold_over`` like spans become one."""
    lines: list[str] = []
    for root in roots:
        _draw(root, 0, root.start_ns, lines, fold_over)
    return lines


def _draw(span: SpanNode, depth: int, origin_ns: int, lines: list[str], fold_over: int) -> None:
    lines.append(_line(span, depth, origin_ns))
    for run in _runs(span.children):
        shown = run if len(run) <= fold_over else run[:1]
        for child in shown:
            _draw(child, depth + 1, origin_ns, lines, fold_over)
        if len(run) > len(shown):
            rest_ms = sum(one.duration_ms for one in run[1:])
            lines.append(
                f"{'  ' * (depth + 1)}… {len(run) - 1} more {run[0].name}, {rest_ms:.0f} ms in all"
            )


def _runs(spans: Iterable[SpanNode]) -> Iterator[list[SpanNode]]:
    """Group siblings by name and service, in the order of the first of each."""
    groups: dict[tuple[str, str], list[SpanNode]] = {}
    for span in spans:
        groups.setdefault((span.name, span.service), []).append(span)
    yield from groups.values()


def _line(span: SpanNode, depth: int, origin_ns: int) -> str:
    label = f"{'  ' * depth}{span.service}: {span.name}"
    offset_ms = (span.start_ns - origin_ns) / 1e6
    failed = "  FAILED" if span.failed else ""
    return f"{label:<64} {offset_ms:9.1f} ms + {span.duration_ms:8.1f} ms{failed}"


def _spans_of(folder: Path, trace_id: str) -> Iterator[SpanNode]:
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if trace_id in line:
                    span = _parse(line, trace_id)
                    if span is not None:
                        yield span


def _parse(line: str, trace_id: str) -> SpanNode | None:
    try:
        fields = json.loads(line)
        if fields["trace_id"] != trace_id:
            return None
        return SpanNode(
            span_id=fields["span_id"],
            parent_id=fields["parent_id"],
            name=fields["name"],
            service=fields["service"] or "",
            start_ns=fields["start_ns"],
            end_ns=fields["end_ns"],
            attributes=fields["attributes"],
            failed=fields["status"] == "ERROR",
        )
    except (ValueError, KeyError, TypeError):
        return None
