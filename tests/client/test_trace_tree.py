"""Reading a trace out of span files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from specrag_client.trace_tree import read_trace, services_of, tree_lines

if TYPE_CHECKING:
    from pathlib import Path

TRACE = "ab" * 16


def span(name: str, span_id: str, parent: str | None, start_ms: int, **fields: Any) -> str:
    return json.dumps(
        {
            "name": name,
            "trace_id": TRACE,
            "span_id": span_id,
            "parent_id": parent,
            "service": "orchestrator",
            "start_ns": start_ms * 1_000_000,
            "end_ns": (start_ms + 10) * 1_000_000,
            "attributes": {},
            "status": "UNSET",
            **fields,
        }
    )


def write(folder: Path, name: str, *lines: str) -> None:
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def test_tree_joins_spans_of_several_files_by_start(tmp_path: Path) -> None:
    write(tmp_path, "one", span("late", "3", "1", 9), span("root", "1", None, 0))
    write(tmp_path, "two", span("early", "2", "1", 1, service="verifier", status="ERROR"))
    roots = read_trace(tmp_path, TRACE)
    assert services_of(roots) == {"orchestrator", "verifier"}
    lines = [line.split() for line in tree_lines(roots)]
    assert [line[1] for line in lines] == ["root", "early", "late"]
    assert lines[1][-1] == "FAILED"
    assert tree_lines(roots)[1].startswith("  verifier: early")


def test_other_traces_and_broken_lines_are_left_out(tmp_path: Path) -> None:
    other = span("other", "9", None, 0, trace_id="cd" * 16, attributes={"seen": TRACE})
    write(tmp_path, "one", other, span("root", "1", None, 0), f'{{"trace_id": "{TRACE}", "na')
    assert [root.name for root in read_trace(tmp_path, TRACE)] == ["root"]


def test_many_like_spans_become_one_line(tmp_path: Path) -> None:
    rounds = [span("round", str(number), "0", number) for number in range(1, 7)]
    write(tmp_path, "one", span("root", "0", None, 0), *rounds)
    lines = tree_lines(read_trace(tmp_path, TRACE))
    assert len(lines) == 3
    assert lines[2] == "  … 5 more round, 50 ms in all"


def test_span_whose_parent_is_not_on_file_is_a_root(tmp_path: Path) -> None:
    write(tmp_path, "one", span("orphan", "1", "gone", 0))
    assert [root.name for root in read_trace(tmp_path, TRACE)] == ["orphan"]
