"""The rules that settle a tree upwards accept at least what trying node by node accepts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.inference.verification.acceptance import (
    SHAPES,
    compute_accepted_lengths,
    compute_node_laws,
    compute_optimal_acceptance,
    compute_sequential_acceptance,
)

ROUNDING = 1e-12


@pytest.mark.parametrize("shape", list(SHAPES))
def test_chosen_rule_accepts_at_least_as_much_as_the_sequential_one(shape: str) -> None:
    worlds = [compute_accepted_lengths(SHAPES[shape], seed) for seed in range(3)]
    assert all(world.chosen >= world.sequential - ROUNDING for world in worlds)
    assert np.mean([world.chosen - world.sequential for world in worlds]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("shape", list(SHAPES))
def test_chosen_rule_accepts_at_least_as_much_in_many_worlds(shape: str) -> None:
    worlds = [compute_accepted_lengths(SHAPES[shape], seed) for seed in range(100, 200)]
    assert all(world.chosen >= world.sequential - ROUNDING for world in worlds)


@pytest.mark.parametrize("max_support", [None, 2])
@pytest.mark.parametrize("num_drafters", [1, 2, 3, 4])
def test_no_rule_accepts_more_than_the_optimum_and_one_draft_reaches_it(
    num_drafters: int, max_support: int | None
) -> None:
    for seed in range(100):
        target, drafts = compute_node_laws(seed, 5, num_drafters, max_support)
        optimum = compute_optimal_acceptance(target, drafts)
        reached = compute_sequential_acceptance(target, drafts)
        assert reached <= optimum + ROUNDING
        if num_drafters == 1:
            assert reached == pytest.approx(optimum)
