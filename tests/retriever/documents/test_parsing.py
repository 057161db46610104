from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_retriever.documents import DocumentSkippedError, SkipReason, extract_document
from specrag_retriever.documents.parsing import MAX_DOCUMENT_BYTES, title_from_uri


@pytest.mark.parametrize(
    ("data", "name", "reason"),
    [
        (b"", "a.txt", SkipReason.EMPTY),
        (b"  \n\t ", "a.md", SkipReason.EMPTY),
        ("\ufeff \n".encode(), "a.md", SkipReason.EMPTY),
        (b"<p hidden>x</p>", "a.html", SkipReason.EMPTY),
        (bytes(range(256)), "a.md", SkipReason.BINARY),
        (b"PK\x03\x04 and so on", "a.docx", SkipReason.UNSUPPORTED),
        (b"\x00\x01\x02" * 50, "a.bin", SkipReason.UNSUPPORTED),
        (b"x" * (MAX_DOCUMENT_BYTES + 1), "a.txt", SkipReason.TOO_LARGE),
    ],
)
def test_unreadable_documents_are_skipped_with_a_reason(
    data: bytes, name: str, reason: SkipReason
) -> None:
    with pytest.raises(DocumentSkippedError) as skipped:
        extract_document(data, name)
    assert skipped.value.reason is reason
    assert skipped.value.detail


def test_unknown_ending_with_text_is_read_as_plain_text() -> None:
    assert extract_document(b"key = value", "settings.conf").text == "key = value"


@pytest.mark.parametrize(
    ("uri", "title"),
    [
        ("docs/a b/leave.md", "leave.md"),
        ("https://x.invalid/docs/leave.md?version=2#top", "leave.md"),
        ("C:\\docs\\leave.md", "leave.md"),
        ("résumé (final) #2 100% & 'q'.txt", "résumé (final) #2 100% & 'q'.txt"),
        ("", ""),
    ],
)  # fmt: skip
def test_title_from_uri_is_the_file_name(uri: str, title: str) -> None:
    assert title_from_uri(uri) == title


def test_uri_with_a_query_chooses_the_parser_by_its_path() -> None:
    assert extract_document(b"# T\n\n*x*", "https://x.invalid/a.md?raw=1").text == "T\n\nx"


@given(st.text(max_size=300), st.sampled_from(["a.txt", "a.md", "a.html"]))
def test_blocks_cover_all_visible_text_in_order(text: str, name: str) -> None:
    try:
        document = extract_document(text.encode(), name)
    except DocumentSkippedError:
        return
    end = 0
    for block in document.blocks:
        assert not document.text[end : block.start].strip()
        assert document.text[block.start : block.end].strip()
        end = block.end
    assert end == len(document.text)
