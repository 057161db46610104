"""Incremental text equals the text of all tokens at once, whatever the chunks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.text.detokenizer import IncrementalDetokenizer

from tests.common.text.tokenizers_for_text import (
    CORPUS,
    END_OF_TEXT,
    MARK,
    build_byte_fallback,
    build_byte_level,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenizers import Tokenizer

BYTE_LEVEL = build_byte_level()
BYTE_FALLBACK = build_byte_fallback()


def decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    return text


def get_id(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None
    return token_id


def cut(token_ids: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """Cut into chunks of the given sizes, the rest at once."""
    start = 0
    for size in sizes:
        yield token_ids[start : start + size]
        start += size
    yield token_ids[start:]


def render(tokenizer: Tokenizer, token_ids: list[int], sizes: list[int]) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(chunk) for chunk in cut(token_ids, sizes)]
    return "".join(pieces) + detokenizer.finish()


chunks = st.lists(st.integers(0, 5), max_size=60)


@given(
    token_ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=60), sizes=chunks
)
def test_any_tokens_in_any_chunks_give_the_text_of_all_at_once(
    token_ids: list[int], sizes: list[int]
) -> None:
    assert render(BYTE_LEVEL, token_ids, sizes) == decode(BYTE_LEVEL, token_ids)


@given(
    text=st.one_of(
        st.sampled_from(CORPUS), st.text(alphabet=st.sampled_from("".join(CORPUS)), max_size=40)
    ),
    sizes=chunks,
)
def test_cjk_and_emoji_text_comes_back_whole(text: str, sizes: list[int]) -> None:
    token_ids = BYTE_LEVEL.encode(text).ids
    assert render(BYTE_LEVEL, token_ids, sizes) == text


@given(text=st.text(alphabet=st.sampled_from("".join(CORPUS)), max_size=30))
def test_no_piece_shows_part_of_a_code_point(text: str) -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    shown = ""
    for token_id in BYTE_LEVEL.encode(text).ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)


@given(
    token_ids=st.lists(st.integers(0, 255).filter(lambda x: x < 0x80) | st.integers(256, 263)),
    sizes=chunks,
)
def test_spaces_of_a_byte_fallback_tokenizer_come_back(
    token_ids: list[int], sizes: list[int]
) -> None:
    assert render(BYTE_FALLBACK, token_ids, sizes) == decode(BYTE_FALLBACK, token_ids)


@given(text=st.text(alphabet=st.sampled_from("".join(CORPUS)), min_size=1), sizes=chunks)
def test_text_spelled_in_fallback_bytes_comes_back(text: str, sizes: list[int]) -> None:
    token_ids = [get_id(BYTE_FALLBACK, "▁hello"), *text.encode()]
    assert render(BYTE_FALLBACK, token_ids, sizes) == "hello" + text


@given(token_ids=st.lists(st.integers(0, 263), max_size=40), sizes=chunks)
def test_chunks_do_not_matter_even_for_broken_fallback_bytes(
    token_ids: list[int], sizes: list[int]
) -> None:
    one_by_one = render(BYTE_FALLBACK, token_ids, [1] * len(token_ids))
    assert render(BYTE_FALLBACK, token_ids, sizes) == one_by_one


def test_genuine_replacement_character_is_shown_at_once() -> None:
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(BYTE_LEVEL.encode("a\ufffd").ids) == "a\ufffd"
    assert detokenizer.finish() == ""


def test_unfinished_code_point_is_held_and_shows_as_replacement_at_the_end() -> None:
    token_ids = BYTE_LEVEL.encode("𓀀").ids
    assert len(token_ids) == 4
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push(token_ids[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(token_ids) == "𓀀"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_special_tokens_are_skipped_even_inside_a_code_point(tokenizer: Tokenizer) -> None:
    end = get_id(tokenizer, END_OF_TEXT)
    spelled = "𓀀".encode() if tokenizer is BYTE_FALLBACK else BYTE_LEVEL.encode("𓀀").ids
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push([end, token_id]) for token_id in spelled]
    assert pieces == ["", "", "", "𓀀"]


def test_added_token_outside_the_byte_alphabet_is_its_own_text() -> None:
    mark = get_id(BYTE_LEVEL, MARK)
    assert render(BYTE_LEVEL, [mark, mark], [1]) == MARK * 2


def test_token_id_beyond_the_vocabulary_has_no_text() -> None:
    assert IncrementalDetokenizer(BYTE_LEVEL).push([10**6]) == ""


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_fork_leaves_the_original_alone(tokenizer: Tokenizer) -> None:
    spelled = list("世".encode()) if tokenizer is BYTE_FALLBACK else BYTE_LEVEL.encode("𓀀").ids
    committed = IncrementalDetokenizer(tokenizer)
    committed.push(spelled[:2])
    speculative = committed.fork()
    whole = decode(tokenizer, spelled)
    assert speculative.push(spelled[2:]) == whole
    assert speculative.push(spelled) == whole
    assert committed.push(spelled[2:]) == whole


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
@pytest.mark.parametrize("text", ["hello ", "\ufffd"])
def test_cost_of_a_token_does_not_grow_with_the_answer(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text * 8000).ids if tokenizer is BYTE_LEVEL else []
    token_ids = token_ids or list((text * 5000).encode())
    started = time.perf_counter()
    assert render(tokenizer, token_ids, []) == decode(tokenizer, token_ids)
    assert time.perf_counter() - started < 3.0
