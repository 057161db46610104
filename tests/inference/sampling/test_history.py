"""Counts of the tokens before a node, against counting everything anew."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.sampling.history import CommittedTokens, TokenHistory

if TYPE_CHECKING:
    from specrag_inference.sampling.history import TokenCounts

tokens = st.lists(st.integers(0, 9), max_size=12)


def as_dict(counts: TokenCounts) -> dict[int, int]:
    pairs = list(zip(counts.token_ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(dict(pairs)) == len(pairs), "a token is counted twice"
    return dict(pairs)


@given(prompt=tokens, steps=st.lists(st.tuples(tokens, tokens), max_size=6))
def test_counts_are_those_of_all_tokens_whatever_was_asked_before(
    prompt: list[int], steps: list[tuple[list[int], list[int]]]
) -> None:
    """Each step asks along some path, then commits some tokens, as a round does."""
    sequence = list(prompt)
    committed = CommittedTokens(sequence, num_prompt_tokens=len(prompt))
    for path, accepted in steps:
        history = TokenHistory(committed=committed, path=path)
        answer = sequence[len(prompt) :] + path
        assert as_dict(history.count_answer()) == Counter(answer)
        assert as_dict(history.count_all()) == Counter(prompt + answer)
        assert history.num_answer_tokens == len(answer)
        sequence += accepted
    assert as_dict(committed.count_answer(())) == Counter(sequence[len(prompt) :])
    assert committed.answer_token_ids == sequence[len(prompt) :]


@given(prompt=tokens, accepted=tokens)
def test_a_batch_leaves_the_state_of_single_steps(prompt: list[int], accepted: list[int]) -> None:
    at_once, one_by_one = list(prompt), list(prompt)
    batch = CommittedTokens(at_once, num_prompt_tokens=len(prompt))
    single = CommittedTokens(one_by_one, num_prompt_tokens=len(prompt))
    batch.count_all(())
    at_once += accepted
    for token_id in accepted:
        one_by_one.append(token_id)
        single.count_all(())
        single.count_answer(())
    for path in ((), (3, 3)):
        assert as_dict(batch.count_all(path)) == as_dict(single.count_all(path))
        assert as_dict(batch.count_answer(path)) == as_dict(single.count_answer(path))


@given(answer=tokens, paths=st.lists(tokens, max_size=5))
def test_a_round_that_rejects_everything_leaves_no_trace(
    answer: list[int], paths: list[list[int]]
) -> None:
    committed = CommittedTokens(answer, num_prompt_tokens=0)
    before = as_dict(committed.count_answer(()))
    for path in paths:
        committed.count_answer(path)
        committed.count_all(path)
    assert as_dict(committed.count_answer(())) == before


def test_a_path_and_the_same_tokens_committed_count_alike() -> None:
    on_path = TokenHistory.of(prompt_token_ids=[1], answer_token_ids=[2], path=[2, 3])
    committed = TokenHistory.of(prompt_token_ids=[1], answer_token_ids=[2, 2, 3])
    assert as_dict(on_path.count_answer()) == as_dict(committed.count_answer())
    assert on_path.num_answer_tokens == committed.num_answer_tokens == 3


def test_long_prompts_are_not_counted_again_at_each_node() -> None:
    prompt = [idx * 7919 % 50_000 for idx in range(8000)]
    committed = CommittedTokens(prompt, num_prompt_tokens=len(prompt))
    committed.count_all(())
    durations = []
    for node in range(32):
        started = time.perf_counter()
        committed.count_all((node, node + 1, 17))
        durations.append(time.perf_counter() - started)
    assert min(durations) < 0.001
