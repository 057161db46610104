"""What a pass costs is learned from passes."""

from __future__ import annotations

import random

import pytest
from specrag_common.speculation.step_costs import PRIOR_SLOPE, StepCosts


def test_costs_are_the_prior_before_anything_was_measured() -> None:
    costs = StepCosts()
    assert costs.base_s == 0.0
    assert costs.slope == PRIOR_SLOPE


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.05, 0.2])
def test_costs_approach_the_true_line_under_noise(slope: float) -> None:
    rng = random.Random(7)
    costs = StepCosts()
    for _ in range(300):
        num_nodes = rng.choice([0, 2, 8, 16])
        costs.observe(num_nodes, 0.04 * (1 + slope * num_nodes) * rng.uniform(0.95, 1.05))
    assert costs.slope == pytest.approx(slope, abs=0.012)
    assert costs.base_s == pytest.approx(0.04, rel=0.1)


def test_slope_stays_near_the_prior_while_all_passes_are_alike() -> None:
    costs = StepCosts()
    for seconds in (0.04, 0.08, 0.03, 0.05):
        costs.observe(8, seconds)
    assert costs.slope == pytest.approx(PRIOR_SLOPE, abs=0.005)


def test_one_stalled_pass_does_not_turn_drafting_off() -> None:
    costs = StepCosts()
    for i in range(50):
        costs.observe(8 * (i % 3), 0.04)
    costs.observe(16, 5.0)
    assert costs.slope < 0.03
