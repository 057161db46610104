"""Laws from logits, against plain definitions in float64."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.history import TokenHistory
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.sampling.processors import check_params, compute_law
from specrag_inference.sampling.truncation import select_top

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def adjust_reference(
    logits: NDArray[np.float64], params: SamplingParams, prompt: list[int], answer: list[int]
) -> list[float]:
    """Bias, minimum length and penalties, token by token, counting everything anew."""

    def adjust(token_id: int, logit: float) -> float:
        logit += dict(params.logit_bias).get(token_id, 0.0)
        if len(answer) < params.min_tokens and token_id in params.stop_token_ids:
            logit = -math.inf
        if token_id in prompt + answer:
            penalty = params.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        logit -= params.frequency_penalty * answer.count(token_id)
        return logit - params.presence_penalty * (token_id in answer)

    return [adjust(token_id, logit) for token_id, logit in enumerate(logits.tolist())]


def compute_reference(logits: Sequence[float], params: SamplingParams) -> NDArray[np.float64]:
    """Temperature, min-p, top-k and top-p by sorting everything; ties go to the lowest id."""
    best = max(logits)
    weights = [math.exp((value - best) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda idx: (-logits[idx], idx))
    order = [idx for idx in order if weights[idx] >= params.min_p]
    if params.top_k:
        order = order[: params.top_k]
    total = sum(weights[idx] for idx in order)
    kept: list[int] = []
    mass = 0.0
    for idx in order:
        if mass >= params.top_p and params.top_p < 1.0:
            break
        kept.append(idx)
        mass += weights[idx] / total
    law = np.zeros(len(logits))
    for idx in kept:
        law[idx] = weights[idx]
    law /= law.sum()
    return law


params_of = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 3.0),
    top_k=st.integers(0, 12),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)


def is_on_edge(weights: NDArray[np.float64], params: SamplingParams) -> bool:
    """Whether rounding may decide about a token: at the edge of top-p or of min-p."""
    mass = np.cumsum(np.sort(weights / weights.sum())[::-1])
    near_top_p = params.top_p < 1.0 and abs(mass - params.top_p).min() < 1e-9
    shares = weights / weights.max()
    return near_top_p or (params.min_p > 0.0 and abs(shares - params.min_p).min() < 1e-9)


@pytest.mark.congruence
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40), params=params_of, ties=st.booleans())
def test_law_equals_the_definition(
    seed: int, size: int, params: SamplingParams, ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=size)
    if ties:
        logits = np.round(logits)
    without_top_p = compute_reference(logits.tolist(), replace(params, top_p=1.0, min_p=0.0))
    kept = compute_reference(logits.tolist(), replace(params, top_p=1.0))
    if not is_on_edge(without_top_p, replace(params, top_p=1.0)) and not is_on_edge(
        kept, replace(params, min_p=0.0)
    ):
        reference = compute_reference(logits.tolist(), params)
        np.testing.assert_allclose(compute_law(logits, params), reference, atol=1e-12)


history_tokens = st.lists(st.integers(0, 7), max_size=12)
adjusting_params_of = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    repetition_penalty=st.floats(0.1, 10.0),
    presence_penalty=st.floats(-2.0, 2.0),
    frequency_penalty=st.floats(-2.0, 2.0),
    logit_bias=st.dictionaries(st.integers(0, 7), st.floats(-100.0, 100.0), max_size=3).map(
        lambda biases: tuple(sorted(biases.items()))
    ),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.frozensets(st.integers(0, 6), max_size=3),
)


@pytest.mark.congruence
@given(
    seed=st.integers(0, 10**6),
    params=adjusting_params_of,
    prompt=history_tokens,
    answer=history_tokens,
    path=history_tokens,
)
def test_law_behind_a_history_equals_the_definition_token_by_token(
    seed: int, params: SamplingParams, prompt: list[int], answer: list[int], path: list[int]
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=8)
    history = TokenHistory.of(prompt_token_ids=prompt, answer_token_ids=answer, path=path)
    law = compute_law(logits, params, history)
    adjusted = adjust_reference(logits, params, prompt, answer + path)
    if params.temperature == 0.0:
        assert law.tolist() == np.eye(8)[int(np.argmax(adjusted))].tolist()
    else:
        np.testing.assert_allclose(law, compute_reference(adjusted, params), atol=1e-12)


@given(
    seed=st.integers(0, 10**6),
    params=adjusting_params_of,
    answer=history_tokens,
    path=history_tokens,
)
def test_committed_tokens_and_the_same_tokens_on_a_path_give_the_same_bits(
    seed: int, params: SamplingParams, answer: list[int], path: list[int]
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=8).astype(np.float32)
    on_path = TokenHistory.of(prompt_token_ids=[1], answer_token_ids=answer, path=path)
    committed = TokenHistory.of(prompt_token_ids=[1], answer_token_ids=answer + path)
    laws = [compute_law(logits, params, history) for history in (on_path, committed)]
    assert laws[0].tobytes() == laws[1].tobytes()


def test_penalties_change_the_argmax_at_temperature_zero() -> None:
    logits = np.array([3.0, 2.5, 0.0], dtype=np.float32)
    history = TokenHistory.of(prompt_token_ids=[0], path=[0])
    for params in (
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.0),
        SamplingParams(frequency_penalty=1.0),
        SamplingParams(logit_bias=((0, -1.0),)),
        SamplingParams(min_tokens=2, stop_token_ids=frozenset({0})),
    ):
        assert compute_law(logits, params, history).tolist() == [0.0, 1.0, 0.0]


def test_repetition_sees_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = np.array([1.0, 0.9], dtype=np.float32)
    history = TokenHistory.of(prompt_token_ids=[0])
    assert compute_law(logits, SamplingParams(repetition_penalty=2.0), history)[1] == 1.0
    others = SamplingParams(presence_penalty=2.0, frequency_penalty=2.0)
    assert compute_law(logits, others, history)[0] == 1.0


def test_end_tokens_come_back_once_the_answer_is_long_enough() -> None:
    logits = np.array([5.0, 0.0], dtype=np.float32)
    params = SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=frozenset({0, 9}))
    laws = [
        compute_law(logits, params, TokenHistory.of(answer_token_ids=[1] * committed, path=path))
        for committed, path in ((0, []), (0, [1]), (1, []), (1, [1]), (2, []))
    ]
    assert [float(law[0]) > 0 for law in laws] == [False, False, False, True, True]


def test_law_with_every_token_ruled_out_fails() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=frozenset({0, 1}))
    for temperature in (0.0, 1.0):
        with pytest.raises(NumericsError, match="every token is ruled out"):
            compute_law(np.zeros(2), replace(params, temperature=temperature))


def test_logit_that_overflows_under_a_penalty_fails() -> None:
    logits = np.array([3e38, 0.0], dtype=np.float32)
    params = SamplingParams(repetition_penalty=0.1)
    with pytest.raises(NumericsError, match="overflowed"):
        compute_law(logits, params, TokenHistory.of(prompt_token_ids=[0]))


def test_bias_for_an_unknown_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token id 4 of logit_bias is outside \[0, 4\)"):
        check_params(SamplingParams(logit_bias=((3, 1.0), (4, 1.0))), 4)


@given(seed=st.integers(0, 10**6), params=params_of)
def test_float32_law_keeps_its_dtype_and_sums_to_one(seed: int, params: SamplingParams) -> None:
    logits = np.random.default_rng(seed).normal(scale=4.0, size=3000).astype(np.float32)
    law = compute_law(logits, params)
    assert law.dtype == np.float32
    assert abs(float(law.sum(dtype=np.float64)) - 1.0) < 1e-5
    assert (law >= 0).all()
    assert not params.top_k or np.count_nonzero(law) <= params.top_k


def test_temperature_zero_is_one_hot_at_the_lowest_of_the_best() -> None:
    logits = np.array([1.0, 5.0, 5.0, 2.0], dtype=np.float32)
    for params in (SamplingParams(), SamplingParams(top_k=3, top_p=0.1)):
        assert compute_law(logits, params).tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300, 5e-324])
def test_tiny_temperature_is_nearly_greedy_without_overflow(temperature: float) -> None:
    logits = np.array([1.0, 5.0, 4.0], dtype=np.float32)
    law = compute_law(logits, SamplingParams(temperature=temperature))
    assert law.tolist() == [0.0, 1.0, 0.0]


def test_huge_logits_and_temperature_stay_finite() -> None:
    logits = np.array([3e38, -3e38, 0.0], dtype=np.float32)
    assert compute_law(logits, SamplingParams(temperature=1.0)).tolist() == [1.0, 0.0, 0.0]
    flat = compute_law(np.arange(4, dtype=np.float32), SamplingParams(temperature=1e30))
    np.testing.assert_allclose(flat, 0.25, atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logit_that_is_no_number_fails(bad: float, temperature: float) -> None:
    logits = np.zeros(5, dtype=np.float32)
    logits[3] = bad
    with pytest.raises(NumericsError, match=r"1 of 5 values are not finite.* at index 3"):
        compute_law(logits, SamplingParams(temperature=temperature))


def test_logits_are_left_alone() -> None:
    logits = np.arange(6, dtype=np.float32)
    compute_law(logits, SamplingParams(temperature=0.5, top_k=2, top_p=0.5))
    assert logits.tolist() == [0, 1, 2, 3, 4, 5]


@given(values=st.lists(st.integers(0, 4), min_size=1, max_size=20), count=st.integers(1, 25))
def test_select_top_takes_the_largest_and_the_lowest_of_ties(values: list[int], count: int) -> None:
    expected = sorted(sorted(range(len(values)), key=lambda idx: (-values[idx], idx))[:count])
    assert select_top(np.array(values, dtype=np.float64), count).tolist() == expected


@pytest.mark.parametrize(
    ("params", "limit_s"),
    [(SamplingParams(), 0.002), (SamplingParams(temperature=1.0, top_p=0.9), 0.010)],
)
def test_law_over_a_large_vocabulary_is_quick(params: SamplingParams, limit_s: float) -> None:
    logits = np.random.default_rng(0).normal(scale=3.0, size=128_256).astype(np.float32)
    durations = []
    for _ in range(15):
        started = time.perf_counter()
        compute_law(logits, params)
        durations.append(time.perf_counter() - started)
    assert min(durations) < limit_s
