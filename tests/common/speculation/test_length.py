"""The draft length follows history: long for a good drafter, none for a useless one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.length import (
    CostModel,
    LengthState,
    choose_gamma,
    compute_expected_tokens,
)

FREE_DRAFTS = CostModel(verify_per_token=0.01)
COSTLY_DRAFTS = CostModel(verify_per_token=0.01, draft_per_token=0.3)


def observe(state: LengthState, *rounds: tuple[int, int]) -> LengthState:
    for num_accepted, num_proposed in rounds:
        state = state.observe(num_accepted=num_accepted, num_proposed=num_proposed)
    return state


def test_perfect_drafter_gets_the_longest_branches() -> None:
    state = observe(LengthState(), *[(8, 8)] * 10)
    assert choose_gamma(state, COSTLY_DRAFTS) == 8


def test_useless_costly_drafter_is_switched_off_then_probed_now_and_then() -> None:
    state = observe(LengthState(), *[(0, 4)] * 10)
    gammas = []
    for _ in range(40):
        gamma = choose_gamma(state, COSTLY_DRAFTS)
        gammas.append(gamma)
        state = observe(state, (0, gamma))
    assert gammas.count(0) >= 36
    assert 2 <= sum(gamma > 0 for gamma in gammas) <= 4


def test_drafter_that_becomes_good_is_found_again() -> None:
    state = observe(LengthState(), *[(0, 4)] * 30)
    gamma = 0
    for _ in range(200):
        gamma = choose_gamma(state, COSTLY_DRAFTS)
        state = observe(state, (gamma, gamma))
    assert gamma == 8


def test_length_grows_with_acceptance_and_shrinks_with_cost() -> None:
    states = [LengthState(accepted=share * 100, trials=100) for share in (0.1, 0.5, 0.8, 0.95)]
    by_acceptance = [choose_gamma(state, COSTLY_DRAFTS) for state in states]
    assert by_acceptance == sorted(by_acceptance)
    assert by_acceptance[0] < by_acceptance[-1]
    assert choose_gamma(states[1], FREE_DRAFTS) > choose_gamma(states[1], COSTLY_DRAFTS)


@pytest.mark.parametrize("gamma", range(9))
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9, 1.0])
def test_expected_tokens_is_the_sum_of_the_series(acceptance: float, gamma: int) -> None:
    series = sum(acceptance**idx for idx in range(gamma + 1))
    assert compute_expected_tokens(acceptance, gamma) == pytest.approx(series)


@given(
    rounds=st.lists(
        st.integers(0, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), max_size=30
    ),
    max_gamma=st.integers(0, 8),
)
def test_state_survives_serialisation_and_the_length_stays_in_range(
    rounds: list[tuple[int, int]], max_gamma: int
) -> None:
    state = observe(LengthState(), *rounds)
    assert LengthState.from_dict(state.to_dict()) == state
    assert 0.0 <= state.acceptance <= 1.0
    assert 0 <= choose_gamma(state, COSTLY_DRAFTS, max_gamma=max_gamma) <= max_gamma


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"accepted": 1.0, "trials": 0.0, "idle_rounds": 0},
        {"accepted": 3.0, "trials": 2.0, "idle_rounds": 0},
        {"accepted": -1.0, "trials": 2.0, "idle_rounds": 0},
        {"accepted": float("nan"), "trials": 2.0, "idle_rounds": 0},
        {"accepted": 1.0, "trials": 2.0, "idle_rounds": -1},
        {"accepted": None, "trials": 2.0, "idle_rounds": 0},
    ],
)
def test_stored_state_that_makes_no_sense_is_refused(data: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a length state"):
        LengthState.from_dict(data)


@pytest.mark.parametrize(("num_accepted", "num_proposed"), [(1, 0), (-1, 3), (4, 3)])
def test_impossible_outcome_is_refused(num_accepted: int, num_proposed: int) -> None:
    with pytest.raises(ValueError, match="outside"):
        LengthState().observe(num_accepted=num_accepted, num_proposed=num_proposed)


def test_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_per_token=-1"):
        CostModel(draft_per_token=-1.0)
