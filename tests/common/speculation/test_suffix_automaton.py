"""The automaton against a brute-force search of all substrings."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.suffix_automaton import ROOT_STATE, SuffixAutomaton

texts = st.lists(st.integers(0, 2), max_size=40)


def find_ends(text: list[int], pattern: list[int]) -> list[int]:
    """Index of the last token of every occurrence."""
    size = len(pattern)
    return [end for end in range(size - 1, len(text)) if text[end - size + 1 : end + 1] == pattern]


def find_longest_repeated_suffix(text: list[int]) -> list[int]:
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        if len(find_ends(text, suffix)) > 1:
            return suffix
    return []


@given(corpus=texts, answer=texts)
def test_match_is_the_longest_suffix_that_occurs_earlier(
    corpus: list[int], answer: list[int]
) -> None:
    automaton = SuffixAutomaton(corpus)
    for idx in range(len(answer) + 1):
        text = corpus + answer[:idx]
        expected = find_longest_repeated_suffix(text)
        match = automaton.get_match()
        assert match.length == len(expected)
        assert (match.state == ROOT_STATE) == (not expected)
        automaton.extend(answer[idx : idx + 1])
    assert automaton.num_tokens == len(corpus) + len(answer)


@pytest.mark.congruence
@given(corpus=texts, answer=texts)
def test_counts_and_last_ends_of_all_suffixes_are_right(
    corpus: list[int], answer: list[int]
) -> None:
    automaton = SuffixAutomaton(corpus)
    automaton.extend(answer)
    text = corpus + answer
    state = automaton.get_match().state
    while state > ROOT_STATE:
        pattern = text[len(text) - automaton.get_length(state) :]
        ends = find_ends(text, pattern)
        assert automaton.get_count(state) == len(ends)
        assert automaton.get_last_end(state) == ends[-1]
        for token_id, target in automaton.get_continuations(state).items():
            followed = find_ends(text, [*pattern, token_id])
            assert automaton.get_count(target) == len(followed)
            assert automaton.get_last_end(target) == followed[-1]
        state = automaton.get_link(state)


def test_extending_equals_building_at_once() -> None:
    text = [1, 2, 1, 1, 2, 3, 1, 2, 1, 1, 2]
    whole = SuffixAutomaton(text)
    grown = SuffixAutomaton()
    grown.extend(text)
    assert grown.get_match() == whole.get_match()


@pytest.mark.parametrize("period", [1, 2, 5, 4000])
def test_building_and_extending_stay_linear_on_text_that_repeats(period: int) -> None:
    started = time.perf_counter()
    automaton = SuffixAutomaton(idx % period for idx in range(8192))
    automaton.extend(idx % period for idx in range(1024))
    assert time.perf_counter() - started < 2.0
