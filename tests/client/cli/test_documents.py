"""``specrag ingest`` and ``specrag search`` against a retriever that keeps documents in memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.errors import FailedPrecondition, UpstreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.client.conftest import MemoryRetriever, Outcome

    Specrag = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with forty documents, one of them empty, and a hidden file."""
    root = tmp_path / "docs"
    (root / "sub").mkdir(parents=True)
    for number in range(39):
        (root / "sub" / f"{number:02}.md").write_text(f"document {number}")
    (root / "empty.md").touch()
    (root / ".hidden").touch()
    return root


def test_ingest_creates_the_collection_and_lists_what_was_skipped(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever, folder: Path
) -> None:
    outcome = specrag("ingest", folder, "--collection", "notes", "--endpoint", retriever)
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (0, "")
    assert lines[0].startswith("39 indexed (78 passages), 0 unchanged, 2 skipped in ")
    assert lines[1:] == [
        "  skipped .hidden — HIDDEN: hidden file",
        "  skipped empty.md — EMPTY: it has no content",
    ]
    assert memory_retriever.collections == {"notes"}
    assert memory_retriever.documents["sub/07.md"] == b"document 7"
    assert len(memory_retriever.documents) == 40


def test_ingest_sends_batches_so_that_progress_moves(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever, folder: Path
) -> None:
    assert specrag("ingest", folder, "--collection", "notes", "--endpoint", retriever).code == 0
    assert memory_retriever.batch_sizes == [16, 16, 8]


def test_ingest_json_accounts_for_every_file(
    specrag: Specrag, retriever: str, folder: Path
) -> None:
    outcome = specrag("ingest", folder, "--collection", "notes", "--endpoint", retriever, "--json")
    summary = json.loads(outcome.out)
    seconds = summary.pop("seconds")
    assert seconds >= 0
    assert summary == {
        "collection": "notes",
        "tenant": "default",
        "num_documents": 41,
        "num_indexed": 39,
        "num_unchanged": 0,
        "num_skipped": 2,
        "num_passages": 78,
        "num_bytes": sum(len(f"document {number}") for number in range(39)),
        "skipped": [
            {"document_id": ".hidden", "reason": "HIDDEN", "detail": "hidden file"},
            {"document_id": "empty.md", "reason": "EMPTY", "detail": "it has no content"},
        ],
        "repaired": [],
    }


def test_document_larger_than_a_message_arrives_whole(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever, tmp_path: Path
) -> None:
    content = bytes(range(256)) * 4096 + b"end"
    (tmp_path / "large.txt").write_bytes(content)
    large = tmp_path / "large.txt"
    assert specrag("ingest", large, "--collection", "notes", "--endpoint", retriever).code == 0
    assert memory_retriever.documents == {"large.txt": content}


def test_ingest_tries_again_when_the_service_is_away_for_a_moment(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever, folder: Path
) -> None:
    memory_retriever.failures_left = 1
    memory_retriever.failure = UpstreamUnavailable("milvus is away", retry_delay_s=0.05)
    outcome = specrag("ingest", folder, "--collection", "notes", "--endpoint", retriever)
    assert outcome.code == 0
    assert len(memory_retriever.documents) == 40


def test_ingest_says_how_far_it_came_when_the_service_refuses(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever, folder: Path
) -> None:
    memory_retriever.failures_left = 1
    memory_retriever.failure = FailedPrecondition("notes has another embedder")
    outcome = specrag("ingest", folder, "--collection", "notes", "--endpoint", retriever)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: after 1 of 41 documents: notes has another embedder\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["ingest", "no/such", "--collection", "c"], "no/such does not exist"),
        (["ingest", "--collection", "c"], "PATHS"),
        (["ingest", "."], "--collection"),
        (["search", "", "--collection", "c"], "QUERY"),
        (["search", "x", "--collection", "c", "--top-n", "0"], "--top-n"),
        (["search", "x", "--collection", "c", "--top-n", "101"], "--top-n"),
        (["search", "x", "--collection", "c", "--retriever", "nowhere"], "HOST:PORT"),
        (["search", "x", "--collection", "c", "--retriever", "h:1", "--dir", "d"], "not both"),
    ],
)
def test_bad_argument_is_named_in_one_line_with_code_2(
    specrag: Specrag, arguments: list[str], named: str
) -> None:
    outcome = specrag(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert named in outcome.err


@pytest.mark.parametrize("command", [["search", "x"], ["ingest", "."]])
def test_endpoint_without_documents_is_told_the_way_out(
    specrag: Specrag, orchestrator: str, command: list[str]
) -> None:
    outcome = specrag(*command, "--collection", "c", "--endpoint", orchestrator)
    assert outcome.code == 2
    assert "name the retriever with --retriever HOST:PORT" in outcome.err


def test_search_prints_rank_title_document_and_text(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever
) -> None:
    memory_retriever.collections.add("notes")
    outcome = specrag("search", "leave", "--collection", "notes", "--endpoint", retriever)
    assert outcome.out == (
        "1. Annual leave — leave.md  score 0.5000\n   Your team lead approves leave.\n"
    )


def test_search_json_has_whole_passages(
    specrag: Specrag, retriever: str, memory_retriever: MemoryRetriever
) -> None:
    memory_retriever.collections.add("notes")
    arguments = ("search", "leave", "--collection", "notes", "--endpoint", retriever, "--json")
    assert json.loads(specrag(*arguments).out) == {
        "query": "leave",
        "collection": "notes",
        "passages": [
            {
                "number": 0,
                "chunk_id": "leave.md#0",
                "document_id": "leave.md",
                "title": "Annual leave",
                "uri": "leave.md",
                "text": "Your team lead approves leave.",
                "start_char": 0,
                "end_char": 30,
                "score": 0.5,
                "metadata": {},
            }
        ],
    }


def test_search_in_an_unknown_collection_is_bad_input(specrag: Specrag, retriever: str) -> None:
    outcome = specrag("search", "x", "--collection", "nowhere", "--endpoint", retriever)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: no collection nowhere\n"


def test_empty_path_is_refused_and_not_the_current_folder(specrag: Specrag, retriever: str) -> None:
    outcome = specrag("ingest", "", "--collection", "notes", "--endpoint", retriever)
    assert outcome.code == 2
    assert "it is empty" in outcome.err
