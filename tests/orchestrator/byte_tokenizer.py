"""A byte-level tokenizer built in memory, and the reading of events back into text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from specrag_orchestrator.answering.transcript import Commit, Retract, Speculative, TextEvent
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from collections.abc import Iterable

END_OF_TEXT = "<|end|>"
VOCAB_SIZE = 257
END_ID = 256
"""Ids 0 to 255 are the bytes; the last one ends an answer."""


def build_byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token a byte: beyond ASCII every character takes several."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    char_of = {byte: chr(byte) for byte in printable}
    char_of.update({byte: chr(256 + idx) for idx, byte in enumerate(others)})
    vocab = {char_of[byte]: byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


TOKENIZER = build_byte_tokenizer()
FINGERPRINT = hashlib.sha256(TOKENIZER.to_str().encode()).hexdigest()


def encode(text: str) -> list[int]:
    """Return the ids of ``text``."""
    return list(text.encode())


class StrictReplay:
    """Applies text events and holds them against the contract of the event stream."""

    def __init__(self) -> None:
        self.committed = ""
        self.speculative = ""
        self.num_retracted = 0
        self._was_retract = False

    def apply_all(self, events: Iterable[TextEvent]) -> None:
        for event in events:
            self.apply(event)

    def apply(self, event: TextEvent) -> None:
        match event:
            case Speculative(offset=offset, text=text):
                assert text, "an empty speculation says nothing"
                assert offset == len(self.committed) + len(self.speculative)
                self.speculative += text
            case Retract(to_offset=to_offset):
                num_kept = to_offset - len(self.committed)
                assert 0 <= num_kept < len(self.speculative), "only speculation is taken back"
                self.num_retracted += len(self.speculative) - num_kept
                self.speculative = self.speculative[:num_kept]
            case Commit(to_offset=to_offset, text=text):
                assert text, "an empty commit says nothing"
                assert to_offset == len(self.committed) + len(text)
                is_prefix = self.speculative.startswith(text)
                assert is_prefix or not self.speculative or self._was_retract
                assert text.startswith(self.speculative[: len(text)])
                self.committed += text
                self.speculative = self.speculative[len(text) :]
        self._was_retract = isinstance(event, Retract)
