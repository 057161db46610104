"""Suffix drafts continue what was seen, and stay away from weak matches."""

from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.proposals import DraftSource
from specrag_common.speculation.suffix_drafter import MAX_NODES, SuffixDrafter

texts = st.lists(st.integers(0, 3), max_size=50)


ANYTHING = 1e-9
"""A bound that every continuation meets."""


def propose(
    corpus: list[int], answer: list[int], *args: int, min_probability: float = ANYTHING
) -> list[list[int]]:
    drafter = SuffixDrafter(corpus)
    drafter.extend(answer)
    branches = drafter.propose(*args, min_probability=min_probability)
    return [list(branch.token_ids) for branch in branches]


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
def test_branches_keep_within_limits_and_none_begins_another(
    corpus: list[int], answer: list[int], max_tokens: int, max_branches: int
) -> None:
    branches = propose(corpus, answer, max_tokens, max_branches)
    assert len(branches) <= max_branches
    assert all(1 <= len(branch) <= max_tokens for branch in branches)
    for idx, branch in enumerate(branches):
        assert all(one[: len(branch)] != branch for one in branches[idx + 1 :])
    assert count_nodes(branches) <= MAX_NODES


def count_nodes(branches: list[list[int]]) -> int:
    return len({tuple(one[:depth]) for one in branches for depth in range(1, len(one) + 1)})


@given(corpus=texts, answer=texts, max_branches=st.integers(1, 4))
def test_dearer_tokens_give_a_part_of_the_tree(
    corpus: list[int], answer: list[int], max_branches: int
) -> None:
    sizes = [
        count_nodes(propose(corpus, answer, 6, max_branches, min_probability=bound))
        for bound in (0.01, 0.05, 0.2, 0.5, 1.0)
    ]
    assert sizes == sorted(sizes, reverse=True)


def test_long_match_is_one_chain_and_close_continuations_fork() -> None:
    sure = [7, 8, 9, 10, 11, 12, 13]
    assert propose([*sure, 0], [1, 2, 7, 8, 9, 10], 3, 4, min_probability=0.1) == [[11, 12, 13]]
    parted = [7, 8, 1, 2, 0, 7, 8, 3, 4, 0]
    assert propose(parted, [9, 7, 8], 2, 4, min_probability=0.05) == [[3, 4], [1, 2]]


def test_forks_may_lie_behind_a_common_beginning() -> None:
    corpus = [5, 6, 7, 1, 0, 5, 6, 7, 2, 0]
    assert propose(corpus, [9, 5, 6], 2, 4, min_probability=0.1) == [[7, 2], [7, 1]]


def test_what_the_answer_did_itself_counts_for_more() -> None:
    corpus = [7, 8, 1, 0, 7, 8, 2, 0]
    assert propose(corpus, [7, 8, 1, 9, 7, 8], 1, 2) == [[1], [2]]


def test_weak_match_proposes_nothing_where_tokens_are_dear() -> None:
    corpus = [7, 1, 7, 2, 7, 3, 7, 4]
    assert propose(corpus, [9, 7], 8, 4, min_probability=0.5) == []
    assert propose(corpus, [9, 7], 8, 4, min_probability=0.05)


def test_nothing_follows_an_end_of_answer() -> None:
    drafter = SuffixDrafter([5, 6, 2, 7, 8, 0], end_token_ids=[2])
    drafter.extend([9, 5])
    assert [branch.token_ids for branch in drafter.propose(8)] == [(6, 2)]


@pytest.mark.parametrize("bound", [0.0, -0.1, 1.1, float("nan")])
def test_bound_that_is_no_probability_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="min_probability"):
        SuffixDrafter([1]).propose(1, min_probability=bound)


def test_no_request_leaves_a_trace_in_another() -> None:
    texts_of = {name: ([idx, 7, 8, idx + 1, 0], [9, 7, 8]) for idx, name in enumerate("abc", 20)}

    def answer_all(order: str) -> dict[str, list[list[int]]]:
        return {name: propose(*texts_of[name], 4, 2) for name in order}

    expected = {name: propose(*texts_of[name], 4, 2) for name in texts_of}
    assert answer_all("abc") == answer_all("cab") == answer_all("bca") == expected
    for idx, name in enumerate("abc", 20):
        strangers = {20, 21, 22, 23} - {idx, idx + 1}
        assert not strangers.intersection(token for branch in expected[name] for token in branch)


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
    drafter = SuffixDrafter(corpus)
    for token_id in answer:
        drafter.propose(3)
        drafter.extend([token_id])
    branches = drafter.propose(6, 2, min_probability=ANYTHING)
    assert [list(branch.token_ids) for branch in branches] == at_once


def test_100k_tokens_are_indexed_in_linear_time_and_memory() -> None:
    rng = random.Random(7)
    words = [int(rng.paretovariate(0.7)) % 30_000 for _ in range(100_000)]
    seconds, sizes = {}, {}
    for num_tokens in (25_000, 100_000):
        corpus = words[:num_tokens]
        tracemalloc.start()
        SuffixDrafter(corpus)
        sizes[num_tokens] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        started = time.process_time()
        SuffixDrafter(corpus)
        seconds[num_tokens] = time.process_time() - started
    assert sizes[100_000] < 5 * sizes[25_000]
    assert seconds[100_000] < 10 * seconds[25_000], "quadratic would be 16 times"


def test_proposal_over_a_large_corpus_is_quick() -> None:
    rng = random.Random(7)
    corpus = [int(rng.paretovariate(0.7)) % 30_000 for _ in range(50_000)]
    drafter = SuffixDrafter(corpus)
    drafter.extend(corpus[1000:1020])
    began = time.process_time()
    for _ in range(50):
        drafter.extend(corpus[3000:3004])
        drafter.propose(8, 4, min_probability=0.02)
    assert (time.process_time() - began) / 50 < 0.01


def test_absurd_min_match_is_refused() -> None:
    with pytest.raises(ValueError, match="min_match=0"):
        SuffixDrafter([], min_match=0)
