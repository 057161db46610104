from __future__ import annotations

import io

import pytest
from fpdf import FPDF
from pypdf import PdfReader, PdfWriter
from specrag_retriever.documents.model import DocumentSkippedError, SkipReason
from specrag_retriever.documents.parsing import extract_document
from specrag_retriever.documents.pdf import parse_pdf


def make_pdf(*pages: str, title: str = "") -> bytes:
    pdf = FPDF()
    pdf.set_font("helvetica", size=12)
    if title:
        pdf.set_title(title)
    for text in pages:
        pdf.add_page()
        if text:
            pdf.multi_cell(0, 8, text)
    return bytes(pdf.output())


def lock(data: bytes, user_password: str) -> bytes:
    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(data)))
    writer.encrypt(user_password, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def skip_of(data: bytes, name: str = "x.pdf") -> DocumentSkippedError:
    with pytest.raises(DocumentSkippedError) as skipped:
        extract_document(data, name)
    return skipped.value


def test_pdf_text_layer_is_read_with_its_title() -> None:
    document = parse_pdf(make_pdf("The pump runs 36 months.", "Page two.", title="Warranty"))
    assert document.text == "The pump runs 36 months.\n\nPage two."
    assert document.title == "Warranty"


def test_words_hyphenated_at_line_ends_are_joined() -> None:
    document = parse_pdf(make_pdf("The indemnity cap is lim-\nited to two million."))
    assert "limited to two" in document.text


def test_pages_without_text_are_counted() -> None:
    document = parse_pdf(make_pdf("Some text.", ""))
    assert document.notes == ("1 of 2 pages have no text layer",)


def test_pdf_of_pictures_only_has_no_text() -> None:
    assert skip_of(make_pdf("", "")).reason is SkipReason.NO_TEXT


def test_pdf_with_a_password_is_locked() -> None:
    assert skip_of(lock(make_pdf("secret"), "open sesame")).reason is SkipReason.LOCKED


def test_pdf_that_only_forbids_printing_is_read() -> None:
    assert parse_pdf(lock(make_pdf("readable"), "")).text == "readable"


@pytest.mark.parametrize("data", [b"%PDF-1.7\n", b"%PDF-1.4\nstartxref\n9\n%%EOF", b"%PDF-" * 99])
def test_broken_pdf_is_reported(data: bytes) -> None:
    skip = skip_of(data)
    assert skip.reason is SkipReason.BROKEN
    assert "\n" not in skip.detail


def test_truncated_pdf_ends_in_text_or_a_named_skip() -> None:
    whole = make_pdf("Some text on a page. " * 20)
    for length in range(10, len(whole), 97):
        try:
            document = parse_pdf(whole[:length])
        except DocumentSkippedError:
            continue
        assert document.text


def test_text_named_pdf_is_read_as_text() -> None:
    document = extract_document(b"just some words", "report.pdf")
    assert document.text == "just some words"
    assert document.notes == ("named .pdf but not a PDF; read as plain text",)
