"""Suffix drafts continue what was seen, and stay away from weak matches."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.proposals import DraftSource
from specrag_common.speculation.suffix_drafter import SuffixDrafter

texts = st.lists(st.integers(0, 3), max_size=50)


def propose(corpus: list[int], answer: list[int], *args: int, **options: float) -> list[list[int]]:
    drafter = SuffixDrafter(corpus, **({"min_probability": 0.0, **options}))  # type: ignore[arg-type]
    drafter.extend(answer)
    return [list(branch.token_ids) for branch in drafter.propose(*args)]


def test_copied_span_is_continued_to_the_asked_length() -> None:
    corpus = list(range(100, 140))
    assert propose(corpus, [1, 2, 110, 111, 112], 5) == [[113, 114, 115, 116, 117]]


def test_branches_are_deterministic_suffix_drafts() -> None:
    drafter = SuffixDrafter([1, 2, 3, 4, 5, 1, 2])
    (branch,) = drafter.propose(2)
    assert branch.source is DraftSource.SUFFIX
    assert branch.laws == (None, None)


def test_most_frequent_continuation_wins_then_the_most_recent() -> None:
    corpus = [7, 8, 1, 0, 7, 8, 2, 0, 7, 8, 1, 0, 7, 8, 3]
    branches = propose(corpus, [9, 7, 8], 1, 3)
    assert branches == [[1], [3], [2]]


def test_longer_context_outweighs_frequency() -> None:
    corpus = [5, 7, 8, 3, 0, 7, 8, 1, 0, 7, 8, 1, 0, 7, 8, 1]
    assert propose(corpus, [5, 7, 8], 1, 2) == [[3], [1]]


def test_text_that_repeats_itself_goes_on_repeating() -> None:
    assert propose([], [4, 5, 6] * 3, 7) == [[4, 5, 6, 4, 5, 6, 4]]


@pytest.mark.parametrize("corpus", [[], [1], [1, 2, 3], [3, 1, 2, 1]])
def test_nothing_repeated_proposes_nothing(corpus: list[int]) -> None:
    assert propose(corpus, [9], 8, 2) == []


def test_no_room_proposes_nothing() -> None:
    assert propose([1, 2, 3, 1, 2], [], 0) == []
    assert propose([1, 2, 3, 1, 2], [], 4, 0) == []


@given(corpus=texts, answer=texts, max_tokens=st.integers(1, 9), max_branches=st.integers(1, 4))
def test_branches_keep_within_limits_and_start_differently(
    corpus: list[int], answer: list[int], max_tokens: int, max_branches: int
) -> None:
    branches = propose(corpus, answer, max_tokens, max_branches)
    assert len(branches) <= max_branches
    assert all(1 <= len(branch) <= max_tokens for branch in branches)
    firsts = [branch[0] for branch in branches]
    assert len(set(firsts)) == len(firsts)


@given(corpus=texts, answer=texts)
def test_first_token_continued_the_longest_repeated_suffix_before(
    corpus: list[int], answer: list[int]
) -> None:
    text = corpus + answer
    branches = propose(corpus, answer, 1)
    followers = find_followers(text)
    if branches:
        assert branches[0][0] in followers


def find_followers(text: list[int]) -> set[int]:
    """Tokens behind earlier occurrences of the longest suffix that has any."""
    for length in range(len(text) - 1, 0, -1):
        suffix = text[len(text) - length :]
        followers = {
            text[end] for end in range(length, len(text)) if text[end - length : end] == suffix
        }
        if followers:
            return followers
    return set()


@given(corpus=texts, answer=texts)
def test_proposal_depends_on_the_text_alone_not_on_how_it_arrived(
    corpus: list[int], answer: list[int]
) -> None:
    at_once = propose(corpus, answer, 6, 2)
    drafter = SuffixDrafter(corpus, min_probability=0.0)
    for token_id in answer:
        drafter.propose(3)
        drafter.extend([token_id])
    assert [list(branch.token_ids) for branch in drafter.propose(6, 2)] == at_once


def test_large_corpus_is_indexed_and_continued_in_time() -> None:
    corpus = [(idx * idx // 7) % 601 for idx in range(8192)]
    started = time.perf_counter()
    drafter = SuffixDrafter(corpus, min_probability=0.0)
    built = time.perf_counter()
    assert built - started < 0.5
    for _ in range(50):
        drafter.propose(8, 2)
    assert (time.perf_counter() - built) / 50 < 0.001


def test_absurd_min_match_is_refused() -> None:
    with pytest.raises(ValueError, match="min_match=0"):
        SuffixDrafter([], min_match=0)
