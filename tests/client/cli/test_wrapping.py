"""Breaking growing text into lines."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_client.cli.screen_text import cut, printable
from specrag_client.cli.wrapping import cells_of, wrap_lines

TEXTS = st.text(alphabet="ab é猫🐟\n ー\u0301", max_size=60)
WIDTHS = st.integers(1, 12)


def shown(text: str, width: int) -> list[str]:
    return [text[line.start : line.end].rstrip(" ") for line in wrap_lines(text, width)]


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("", 5, [""]),
        ("one two", 7, ["one two"]),
        ("one two", 6, ["one", "two"]),
        ("one two three", 8, ["one two", "three"]),
        ("a\n\nb", 5, ["a", "", "b"]),
        ("abcdefgh", 3, ["abc", "def", "gh"]),
        ("x abcdefgh", 4, ["x", "abcd", "efgh"]),
        ("猫が好き", 4, ["猫が", "好き"]),
        ("猫が好き", 5, ["猫が", "好き"]),
        ("a猫が", 3, ["a猫", "が"]),
        ("go 猫 go", 5, ["go 猫", "go"]),
        ("猫", 1, ["猫"]),
        ("a     b", 3, ["a", "b"]),
        ("  indented", 20, ["  indented"]),
    ],
)
def test_lines_break_where_a_reader_expects(text: str, width: int, lines: list[str]) -> None:
    assert shown(text, width) == lines


@given(TEXTS, TEXTS, WIDTHS)
def test_all_lines_but_the_last_stay_when_text_is_appended(
    text: str, more: str, width: int
) -> None:
    settled = wrap_lines(text, width)[:-1]
    assert wrap_lines(text + more, width)[: len(settled)] == settled


@given(TEXTS, WIDTHS)
def test_lines_fit_and_lose_nothing_but_blanks_and_line_feeds(text: str, width: int) -> None:
    lines = wrap_lines(text, width)
    for line in lines:
        visible = text[line.start : line.end].rstrip(" ")
        assert sum(map(cells_of, visible)) <= max(width, 2) or len(visible) == 1
    assert lines[0].start == 0
    assert lines[-1].end == len(text)
    for one, following in itertools.pairwise(lines):
        assert text[one.end : following.start] in {"", "\n"}


@given(st.text(max_size=40))
def test_printable_text_keeps_its_length_and_cannot_steer_the_terminal(text: str) -> None:
    safe = printable(text)
    assert len(safe) == len(text)
    assert not any(ord(one) < 32 and one != "\n" for one in safe)
    assert "\x1b" not in safe
    assert "\x9b" not in safe


@given(st.text(alphabet="ab 猫🐟", max_size=30), st.integers(2, 20))
def test_cut_text_fits(text: str, width: int) -> None:
    shortened = cut(text, width)
    assert sum(map(cells_of, shortened)) <= width
    assert shortened == text or shortened.endswith("…")
