from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from specrag_retriever.chunking import TextPassage, split_into_windows

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def passage_of(text: str, *headings: str) -> TextPassage:
    return TextPassage(start=0, end=len(text), headings=headings, text=text)


def test_short_passage_is_one_window_with_its_context(tokenizer: Tokenizer) -> None:
    windows = split_into_windows(passage_of("27 days.", "Leave"), "Handbook", tokenizer, 256)
    assert [one.embedder_text for one in windows] == ["Handbook > Leave\n27 days."]


def test_heading_that_begins_the_passage_is_not_repeated(tokenizer: Tokenizer) -> None:
    windows = split_into_windows(passage_of("Leave\n\n27 days."), "Leave", tokenizer, 256)
    assert windows[0].embedder_text == "Leave\n\n27 days."


@pytest.mark.parametrize("num_words", [60, 100, 300, 2000])
def test_windows_cover_the_passage_and_fit_the_embedder(
    tokenizer: Tokenizer, num_words: int
) -> None:
    words = [f"w{index}" for index in range(num_words)]
    windows = split_into_windows(passage_of(" ".join(words)), "A title", tokenizer, 64)
    assert len(windows) > 1
    seen = {word for window in windows for word in window.text.split()}
    assert seen >= set(words)
    assert windows[0].text.startswith("w0 ")
    assert windows[-1].text.endswith(words[-1])
    for window in windows:
        assert len(tokenizer.encode(window.embedder_text).ids) <= 64


def test_endless_title_leaves_room_for_the_text(tokenizer: Tokenizer) -> None:
    windows = split_into_windows(passage_of("the words " * 80), "title " * 300, tokenizer, 128)
    for window in windows:
        assert len(tokenizer.encode(window.embedder_text).ids) <= 128


def test_text_the_embedder_has_no_word_for_is_still_a_window(tokenizer: Tokenizer) -> None:
    assert len(split_into_windows(passage_of("\u200d\u200d"), "", tokenizer, 256)) == 1
