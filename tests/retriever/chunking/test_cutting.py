from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from specrag_retriever.chunking.cutting import cut
from specrag_retriever.chunking.token_spans import TokenSpans, compute_token_spans

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def one_token_a_character(text: str) -> TokenSpans:
    starts = np.arange(len(text), dtype=np.int64)
    return TokenSpans(starts, starts + 1)


def pieces_of(text: str, max_tokens: int) -> list[str]:
    spans = one_token_a_character(text)
    found = cut(text, spans, 0, len(text), max_tokens=max_tokens)
    return [text[piece.start : piece.end] for piece in found]


def test_cut_prefers_the_last_sentence_end() -> None:
    text = "One sentence here. Another one there. And a third one follows."
    assert pieces_of(text, 40) == [
        "One sentence here. Another one there.", "And a third one follows.",
    ]  # fmt: skip


def test_cut_falls_back_to_white_space_then_to_anywhere() -> None:
    assert pieces_of("aaaa bbbb cccc", 10) == ["aaaa bbbb", "cccc"]
    assert pieces_of("a" * 25, 10) == ["a" * 10, "a" * 10, "a" * 5]


def test_cut_does_not_tear_emoji_and_accents() -> None:
    family = "👨\u200d👩\u200d👧\u200d👦"
    for piece in pieces_of(family * 9, 10):
        assert piece.replace(family, "") == ""
    assert all(piece[0] == "e" for piece in pieces_of("e\u0301" * 20, 7))


@given(st.text(max_size=400), st.integers(1, 50))
def test_pieces_cover_the_visible_text_within_the_budget(text: str, max_tokens: int) -> None:
    spans = one_token_a_character(text)
    end = 0
    for piece in cut(text, spans, 0, len(text), max_tokens=max_tokens):
        assert not text[end : piece.start].strip()
        assert 0 < piece.end - piece.start <= max_tokens
        end = piece.end
    assert not text[end:].strip()


def test_long_lines_are_cut_in_linear_time(tokenizer: Tokenizer) -> None:
    """Four times the text takes about four times as long; sixteen would be quadratic."""

    def seconds(num_chars: int) -> float:
        text = ("endless" * 3 + " ") * (num_chars // 22)
        began = time.perf_counter()
        spans = compute_token_spans(tokenizer, text)
        assert list(cut(text, spans, 0, len(text), max_tokens=100))
        return time.perf_counter() - began

    seconds(20_000)
    best = [min(seconds(size) for _ in range(3)) for size in (50_000, 200_000)]
    assert best[1] < 10 * best[0] + 0.05
