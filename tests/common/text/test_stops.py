"""Stop strings: which match wins, and what is held back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.text.stops import StopMatch, StopMatcher

stop_lists = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4)
texts = st.text(alphabet="abc\n", max_size=30)


def test_earliest_match_wins_then_the_longest() -> None:
    matcher = StopMatcher(["b", "bc", "abx", "cd"])
    assert matcher.find("xabcd") == StopMatch(start=2, stop="bc")
    assert matcher.find("xacd") == StopMatch(start=2, stop="cd")
    assert matcher.find("xyz") is None


def test_search_starts_where_told() -> None:
    assert StopMatcher(["aa"]).find("aabaa", search_from=1) == StopMatch(start=3, stop="aa")


@pytest.mark.parametrize(
    ("text", "held"),
    [("", 0), ("x", 0), ("x\n", 1), ("x\n\n", 2), ("x\n\nQ", 3), ("x\n\n\n", 2), ("\n\nQ:", 0)],
)
def test_suffix_that_could_begin_a_stop_is_held_back(text: str, held: int) -> None:
    assert StopMatcher(["\n\nQ:"]).held_back(text) == held


@given(stops=stop_lists, text=texts)
def test_held_back_equals_the_definition(stops: list[str], text: str) -> None:
    prefixes = {stop[:size] for stop in stops for size in range(1, len(stop))}
    lengths = [size for size in range(1, len(text) + 1) if text[len(text) - size :] in prefixes]
    assert StopMatcher(stops).held_back(text) == max(lengths, default=0)


@given(stops=stop_lists, text=texts, more=texts)
def test_text_that_was_not_held_back_is_never_part_of_a_later_match(
    stops: list[str], text: str, more: str
) -> None:
    matcher = StopMatcher(stops)
    if matcher.find(text) is None:
        shown = len(text) - matcher.held_back(text)
        match = matcher.find(text + more)
        assert match is None or match.start >= shown


def test_no_stops_match_nothing_and_hold_nothing() -> None:
    matcher = StopMatcher([])
    assert matcher.find("anything") is None
    assert matcher.held_back("anything") == matcher.max_length == 0


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
