"""Token ids to text, one token at a time, never showing half a code point.

Invariant kept: whatever the chunking of the pushes, the pieces concatenate to the text of all
tokens at once. For byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM2 …) the bytes of each token
run through an incremental UTF-8 decoder, so a genuine U+FFFD is told from an unfinished code point
at once. Others are decoded in a small window behind the last complete piece.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

from tokenizers import Tokenizer, decoders

if TYPE_CHECKING:
    from collections.abc import Iterable

_REPLACEMENT = "\ufffd"
_MAX_HELD_TOKENS = 16


class _PieceDecoder(Protocol):
    """Turns tokens into decided text; holds what is undecided."""

    def push(self, token_id: int) -> str:
        """Take one token that is not special; return the text it decides."""
        ...

    def finish(self) -> str:
        """Return what was held back and forget it."""
        ...

    def fork(self) -> _PieceDecoder:
        """Return an independent copy."""
        ...


class IncrementalDetokenizer:
    """Renders a growing sequence of tokens as text; costs the same for each token.

    Special tokens are skipped. Pushing after :meth:`finish` starts a text of its own.
    """

    __slots__ = ("_pieces", "_special_ids")

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Bind to ``tokenizer``, which is only read."""
        self._special_ids = frozenset(
            token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        )
        self._pieces: _PieceDecoder
        if isinstance(tokenizer.decoder, decoders.ByteLevel):
            self._pieces = _ByteLevelDecoder(tokenizer)
        else:
            self._pieces = _WindowDecoder(tokenizer)

    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return the text that is decided by now and was not before."""
        return "".join(
            self._pieces.push(token_id)
            for token_id in token_ids
            if token_id not in self._special_ids
        )

    def finish(self) -> str:
        """Return the text held back: an unfinished code point shows as U+FFFD."""
        return self._pieces.finish()

    def fork(self) -> IncrementalDetokenizer:
        """Return an independent copy, for rendering speculative tokens behind committed ones."""
        copy = object.__new__(IncrementalDetokenizer)
        copy._special_ids = self._special_ids
        copy._pieces = self._pieces.fork()
        return copy


class _ByteLevelDecoder:
    """Exact: each token's bytes through an incremental UTF-8 decoder."""

    __slots__ = ("_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        token = self._tokenizer.id_to_token(token_id)
        return "" if token is None else self._utf8.decode(_get_token_bytes(token))

    def finish(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def fork(self) -> _ByteLevelDecoder:
        copy = _ByteLevelDecoder(self._tokenizer)
        copy._utf8.setstate(self._utf8.getstate())
        return copy


class _WindowDecoder:
    """Any decoder: text of (last complete tokens + undecided tokens) beyond that of the former.

    A text that ends in U+FFFD may be unfinished, unless the last token *reduced* the number of
    U+FFFD at the end: then it completed a genuine one out of fallback bytes.
    """

    __slots__ = ("_held", "_num_marks", "_shown", "_shown_text", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._shown_text = ""
        self._held: list[int] = []
        self._num_marks = 0

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._shown + self._held)
        num_marks = len(text) - len(text.rstrip(_REPLACEMENT))
        unfinished = num_marks >= max(1, self._num_marks)
        if unfinished and len(self._held) < _MAX_HELD_TOKENS:
            self._num_marks = num_marks
            return ""
        return self._show(text)

    def finish(self) -> str:
        text = self._decode(self._shown + self._held) if self._held else self._shown_text
        piece = text[len(self._shown_text) :]
        self._shown, self._shown_text, self._held, self._num_marks = [], "", [], 0
        return piece

    def fork(self) -> _WindowDecoder:
        copy = _WindowDecoder(self._tokenizer)
        copy._shown = list(self._shown)
        copy._shown_text = self._shown_text
        copy._held = list(self._held)
        copy._num_marks = self._num_marks
        return copy

    def _show(self, text: str) -> str:
        """Mark everything held as shown; keep it as the window's left context."""
        piece = text[len(self._shown_text) :]
        if piece:
            self._shown = self._held
            self._shown_text = self._decode(self._shown)
        else:
            self._shown = self._shown + self._held
        self._held = []
        self._num_marks = 0
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def _build_byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of the byte-level alphabet stands for.

    Printable Latin-1 characters stand for themselves, the other bytes, in order, for the code
    points from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + idx): byte for idx, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _build_byte_alphabet()


def _get_token_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; an added token outside the alphabet is its text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()
