"""Bytes to text: byte order marks, UTF-8, UTF-16, legacy encodings, counted damage.

The order matters: a mark decides; valid UTF-8 is UTF-8; then text must be told from binary before
any single-byte encoding is tried, because those accept every byte.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import Final

from charset_normalizer import from_bytes

from specrag_retriever.documents.model import DocumentSkippedError, SkipReason

_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MAGIC: Final = (
    (b"PK\x03\x04", "a ZIP container"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"),
    (b"\xd0\xcf\x11\xe0", "an old Office file"),
    (b"SQLite format 3", "a database"),
)
_CONTROLS: Final = bytes(range(9)) + bytes(range(14, 27)) + bytes(range(28, 32)) + b"\x7f"
_MAX_CONTROL_SHARE: Final = 0.01
_DETECTION_BYTES: Final = 256 * 1024
_MIN_LETTER_SHARE: Final = 0.8
_HTML_CHARSET: Final = re.compile(rb"""<meta[^>]{0,200}?charset\s*=\s*["']?([\w.:-]{2,40})""", re.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedText:
    """Text, and what had to be assumed or repaired to get it."""

    text: str
    notes: tuple[str, ...] = ()


def decode(data: bytes) -> DecodedText:
    """Return the text of ``data``.

    Raises:
        DocumentSkippedError: BINARY when the bytes are no text.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _decode_as(data, encoding)
    wide = _wide_encoding(data)
    if wide is not None:
        return _decode_as(data, wide)
    refuse_binary(data)
    try:
        return DecodedText(text=data.decode("utf-8"))
    except UnicodeDecodeError:
        return _decode_damaged_or_legacy(data)


def decode_html(data: bytes) -> DecodedText:
    """Return the text of an HTML page, obeying the charset it declares unless a mark is there."""
    declared = _HTML_CHARSET.search(data[:2048])
    if declared is None or any(data.startswith(mark) for mark, _ in _MARKS):
        return decode(data)
    refuse_binary(data)
    try:
        encoding = codecs.lookup(declared[1].decode("ascii")).name
        data[:64].decode(encoding, errors="replace")
    except (LookupError, UnicodeError):
        return decode(data)
    if encoding.startswith(("utf-16", "utf-32")):  # the declaration itself was read as ASCII
        return decode(data)
    return decode(data) if encoding == "utf-8" else _decode_as(data, encoding)


def refuse_binary(data: bytes) -> None:
    """Raise DocumentSkippedError(BINARY) when the bytes are no text in a byte-oriented encoding."""
    for magic, name in _MAGIC:
        if data.startswith(magic):
            raise DocumentSkippedError(SkipReason.BINARY, f"the content is {name}, not text")
    num_controls = len(data) - len(data.translate(None, delete=_CONTROLS))
    if num_controls > max(1, _MAX_CONTROL_SHARE * len(data)):
        raise DocumentSkippedError(
            SkipReason.BINARY,
            f"{num_controls} of {len(data)} bytes are control characters; this is not text",
        )


def _wide_encoding(data: bytes) -> str | None:
    """Recognise UTF-16 without a mark by the zero bytes of its ASCII characters."""
    head = data[: 4096 & ~1]
    if len(head) < 4 or len(data) % 2:
        return None
    half = len(head) // 2
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if odd > 0.4 * half and even < 0.05 * half:
        return "utf-16-le"
    if even > 0.4 * half and odd < 0.05 * half:
        return "utf-16-be"
    return None


def _decode_as(data: bytes, encoding: str) -> DecodedText:
    try:
        return DecodedText(text=data.decode(encoding))
    except UnicodeDecodeError:
        return _decode_replacing(data, encoding)


def _decode_damaged_or_legacy(data: bytes) -> DecodedText:
    legacy = _legacy_encoding(data)
    if legacy is None:
        return _decode_replacing(data, "utf-8")
    return DecodedText(text=data.decode(legacy), notes=(f"read as {legacy}: not valid UTF-8",))


def _decode_replacing(data: bytes, encoding: str) -> DecodedText:
    text = data.decode(encoding, errors="replace")
    genuine = data.count("\ufffd".encode(encoding.removesuffix("-sig")))
    num_bad = max(1, text.count("\ufffd") - genuine)
    shown = encoding.removesuffix("-sig").upper()
    return DecodedText(text=text, notes=(f"{num_bad} undecodable {shown} sequences replaced",))


def _legacy_encoding(data: bytes) -> str | None:
    """Return the encoding under which the high bytes are letters within words, if there is one.

    Damaged UTF-8 also decodes under every single-byte encoding, but into symbols at odd places.
    """
    best = from_bytes(data[:_DETECTION_BYTES]).best()
    candidates = [best.encoding] if best is not None else []
    for encoding in [*candidates, "cp1252"]:
        try:
            text = data.decode(encoding)[:_DETECTION_BYTES]
        except (UnicodeDecodeError, LookupError):
            continue
        if encoding != "utf_8" and _letter_share(text) >= _MIN_LETTER_SHARE:
            return encoding
    return None


def _letter_share(text: str) -> float:
    """Return the share of non-ASCII characters that are letters or punctuation of words."""
    num_high = num_good = 0
    padded = f" {text} "
    for index, character in enumerate(text):
        if character < "\x80":
            continue
        num_high += 1
        beside = padded[index], padded[index + 2]
        num_good += character.isalpha() and any(one.isalpha() for one in beside)
    return num_good / num_high if num_high else 0.0
