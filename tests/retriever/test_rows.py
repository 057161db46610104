from __future__ import annotations

import numpy as np
import pytest
from specrag_retriever.chunking import TextPassage, Window
from specrag_retriever.milvus_schema import DENSE_FIELD, LEXICAL_TEXT_FIELD
from specrag_retriever.rows import (
    MAX_BATCH_BYTES,
    DocumentIdentity,
    IndexedDocument,
    batches,
    build_rows,
)


def identity(**changes: object) -> DocumentIdentity:
    values: dict[str, object] = {
        "tenant": "t", "document_id": "d", "title": "", "uri": "u", "metadata": {"k": "v"},
        "content_digest": b"x",
    }  # fmt: skip
    return DocumentIdentity(**(values | changes))  # type: ignore[arg-type]


def document(num_passages: int, text: str = "text") -> IndexedDocument:
    passages = [
        TextPassage(start=index, end=index + len(text), headings=(), text=text)
        for index in range(num_passages)
    ]
    return IndexedDocument(
        identity=identity(),
        passages=passages,
        windows=[[Window(context="", text=text)] * 2 for _ in passages],
        vectors=np.arange(num_passages * 2 * 4, dtype=np.float32).reshape(-1, 4),
        shown_title="T",
    )


@pytest.mark.parametrize(
    "change",
    [
        {"tenant": "t2"}, {"document_id": "d2"}, {"title": "x"}, {"uri": "u2"},
        {"metadata": {"k": "w"}}, {"metadata": {}}, {"content_digest": b"y"},
    ],
)  # fmt: skip
def test_version_changes_with_anything_that_is_stored(change: dict[str, object]) -> None:
    assert identity().version == identity().version
    assert identity(**change).version != identity().version


def test_version_does_not_confuse_neighbouring_fields() -> None:
    assert identity(title="ab", uri="c").version != identity(title="a", uri="bc").version


def test_row_that_marks_the_document_complete_comes_last() -> None:
    rows = list(build_rows(document(3), has_lexical=True))
    assert [row["row_idx"] for row in rows] == [5, 4, 3, 2, 1, 0]
    assert len({row["row_id"] for row in rows}) == 6
    for row in rows:
        assert row[DENSE_FIELD][0] == row["row_idx"] * 4
        assert row["chunk_id"].endswith(f"-{row['passage_idx']}")
        assert row["start_char"] == row["passage_idx"]
        assert row["num_rows"] == 6


def test_rows_without_a_keyword_index_have_no_keyword_text() -> None:
    assert LEXICAL_TEXT_FIELD not in next(build_rows(document(1), has_lexical=False))


def test_batches_are_bounded_by_bytes_and_lose_nothing() -> None:
    rows = list(build_rows(document(300, "日本" * 4000), has_lexical=False))
    found = list(batches(iter(rows)))
    assert len(found) == 2
    assert [row["row_id"] for batch in found for row in batch] == [row["row_id"] for row in rows]
    for batch in found:
        assert sum(len(row["text"].encode()) for row in batch) < MAX_BATCH_BYTES + 100_000
