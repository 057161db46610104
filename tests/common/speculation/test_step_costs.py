"""What a pass and a round cost is learned from passes and rounds."""

from __future__ import annotations

import random

import pytest
from specrag_common.speculation.step_costs import PRIOR_BASE_S, PRIOR_TOKEN_SHARE, StepCosts


def observe(costs: StepCosts, num_tokens: int, seconds: float, num_sequences: int = 1) -> None:
    costs.observe_pass(num_tokens=num_tokens, num_sequences=num_sequences, seconds=seconds)


def test_costs_are_the_prior_before_anything_was_measured() -> None:
    costs = StepCosts()
    assert costs.plain_pass_s == pytest.approx(PRIOR_BASE_S * (1 + PRIOR_TOKEN_SHARE))
    assert costs.token_s == pytest.approx(PRIOR_BASE_S * PRIOR_TOKEN_SHARE)
    assert costs.num_sequences == 1
    assert costs.round_s > 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.05, 0.2])
def test_costs_approach_the_true_line_under_noise(share: float) -> None:
    rng = random.Random(7)
    costs = StepCosts()
    for _ in range(300):
        num_tokens = rng.choice([1, 3, 9, 17])
        observe(costs, num_tokens, 0.04 * (1 + share * num_tokens) * rng.uniform(0.95, 1.05))
    assert costs.token_s == pytest.approx(0.04 * share, abs=0.0005)
    assert costs.plain_pass_s == pytest.approx(0.04 * (1 + share), rel=0.1)


def test_a_fuller_pass_is_not_blamed_on_the_tree() -> None:
    rng = random.Random(7)
    costs = StepCosts()
    for step in range(400):
        num_sequences = 1 + step // 50 * 2
        # The more sequences, the shorter the drafts: without the load a node would seem free.
        num_tokens = num_sequences * (1 + rng.randrange(0, 12 // num_sequences + 1))
        seconds = 0.02 + 0.001 * num_tokens + 0.003 * num_sequences
        observe(costs, num_tokens, seconds * rng.uniform(0.97, 1.03), num_sequences)
    assert costs.token_s == pytest.approx(0.001, rel=0.5)
    assert costs.num_sequences == pytest.approx(15, abs=0.5)
    assert costs.plain_pass_s == pytest.approx(0.02 + 0.004 * 15, rel=0.1)


def test_slope_stays_near_the_prior_while_all_passes_are_alike() -> None:
    costs = StepCosts()
    for seconds in (0.04, 0.08, 0.03, 0.05):
        observe(costs, 8, seconds)
    assert costs.token_s == pytest.approx(PRIOR_TOKEN_SHARE * 0.05, rel=0.3)


def test_one_stalled_pass_does_not_turn_drafting_off() -> None:
    costs = StepCosts()
    for i in range(50):
        observe(costs, 1 + 8 * (i % 3), 0.04)
    observe(costs, 17, 5.0)
    assert costs.token_s < 0.03 * 0.04


def test_round_trip_is_learned_and_one_odd_value_moves_it_little() -> None:
    costs = StepCosts()
    observe(costs, 1, 0.04)
    for _ in range(60):
        costs.observe_round(0.012)
        costs.observe_alone(0.002)
    assert costs.round_s == pytest.approx(0.012, rel=0.1)
    assert costs.alone_s == pytest.approx(0.002, rel=0.1)
    before = costs.round_s
    costs.observe_round(9.0)
    costs.observe_round(-1.0)
    assert costs.round_s == pytest.approx(before, rel=0.35)
