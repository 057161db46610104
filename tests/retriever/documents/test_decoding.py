from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_retriever.documents.decoding import decode, decode_html
from specrag_retriever.documents.model import DocumentSkippedError, SkipReason

TEXT = "The Kestrel pump runs 36 months.\r\nGrüße, 日本 🍕"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_decode_obeys_byte_order_marks(encoding: str) -> None:
    decoded = decode(TEXT.encode(encoding))
    assert decoded.text == TEXT
    assert decoded.notes == ()


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_decode_recognises_utf16_without_a_mark(encoding: str) -> None:
    assert decode("plain English text".encode(encoding)).text == "plain English text"


def test_decode_keeps_the_readable_part_of_damaged_utf8_and_counts_the_rest() -> None:
    decoded = decode(b"The number is 555-0142. \xc3( \xa0\xa1 end of page.\nna\xc3")
    assert decoded.text.startswith("The number is 555-0142. \ufffd(")
    assert decoded.notes == ("4 undecodable UTF-8 sequences replaced",)


def test_decode_reads_legacy_encodings_whose_high_bytes_are_letters() -> None:
    text = "Die Größe der Straße in Zürich beträgt über fünf Kilometer, sagt Herr Müller."
    decoded = decode(text.encode("cp1252"))
    assert decoded.text == text
    assert len(decoded.notes) == 1
    assert "not valid UTF-8" in decoded.notes[0]


@pytest.mark.parametrize(
    "data", [bytes(range(256)) * 4, b"\x7fELF" + bytes(100), b"PK\x03\x04rest", b"\x89PNG\r\n"]
)
def test_decode_refuses_binary(data: bytes) -> None:
    with pytest.raises(DocumentSkippedError) as skipped:
        decode(data)
    assert skipped.value.reason is SkipReason.BINARY


def test_decode_html_obeys_the_declared_charset() -> None:
    page = '<meta charset="shift_jis"><p>大阪オフィス</p>'
    assert "大阪オフィス" in decode_html(page.encode("shift_jis")).text


@pytest.mark.parametrize("charset", ["nonsense", "utf-16", "utf-8"])
def test_decode_html_survives_a_wrong_charset(charset: str) -> None:
    page = f'<meta charset="{charset}"><p>Grüße</p>'
    assert "Grüße" in decode_html(page.encode()).text


@given(st.binary(max_size=400))
def test_decode_returns_text_or_a_named_skip_for_any_bytes(data: bytes) -> None:
    try:
        text = decode(data).text
    except DocumentSkippedError as skipped:
        assert skipped.detail  # noqa: PT017 - either outcome is right
    else:
        text.encode()


@given(st.text())
def test_decode_returns_valid_utf8_text_unchanged(text: str) -> None:
    data = text.encode()
    try:
        decoded = decode(data)
    except DocumentSkippedError:
        return  # control characters make it binary
    if not data.startswith((b"\xff\xfe", b"\xfe\xff", b"\xef\xbb\xbf")) and "\x00" not in text:
        assert decoded.text == text
