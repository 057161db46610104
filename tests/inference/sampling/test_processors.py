"""Laws from logits, against plain definitions in float64."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.sampling.processors import compute_law
from specrag_inference.sampling.truncation import select_top

if TYPE_CHECKING:
    from numpy.typing import NDArray


def compute_reference(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.float64]:
    """Temperature, top-k and top-p by sorting everything; ties go to the lowest id."""
    weights = [np.exp((value - logits.max()) / params.temperature) for value in logits]
    order = sorted(range(len(logits)), key=lambda idx: (-logits[idx], idx))
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
)


@pytest.mark.congruence
@given(seed=st.integers(0, 10**6), size=st.integers(1, 40), params=params_of, ties=st.booleans())
def test_law_equals_the_definition(
    seed: int, size: int, params: SamplingParams, ties: bool
) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=size)
    if ties:
        logits = np.round(logits)
    law = compute_law(logits, params)
    reference = compute_reference(logits, params)
    on_edge = abs(np.sort(np.cumsum(np.sort(reference)[::-1])) - params.top_p).min() < 1e-9
    if not on_edge or params.top_p == 1.0:
        np.testing.assert_allclose(law, reference, atol=1e-12)


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
