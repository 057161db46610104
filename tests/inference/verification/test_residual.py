"""What is left to a node after rejected proposals, also where rounding leaves nothing."""

from __future__ import annotations

import numpy as np
import pytest
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.verification.residual import Residual
from specrag_inference.verification.trials import Trial, TrialLaw

TARGET = np.array([0.25, 0.25, 0.5], dtype=np.float32)


def build_trial(token_id: int, probs: list[float] | None = None) -> Trial:
    law = (
        TrialLaw.one_hot(token_id)
        if probs is None
        else TrialLaw(token_ids=np.arange(len(probs), dtype=np.int32), probs=np.array(probs))
    )
    return Trial(
        token_id=token_id,
        node_idx=0,
        drafter_index=0,
        branch_idx=0,
        law=law,
        is_sampled=probs is not None,
    )


def test_sampled_proposal_is_accepted_by_the_ratio_and_taken_out() -> None:
    residual = Residual(TARGET)
    trial = build_trial(0, [0.5, 0.125, 0.375])
    assert residual.compute_acceptance(trial) == pytest.approx(0.5)
    residual.reject(trial)
    assert residual.get_law().tolist() == pytest.approx([0, 0.5, 0.5])
    assert residual.weight == 1.0


def test_weight_left_is_what_a_failure_leaves_of_it() -> None:
    residual = Residual(TARGET, 0.8)
    trial = build_trial(0, [0.5, 0.125, 0.375])
    assert residual.compute_acceptance(trial) == pytest.approx(0.4)
    residual.reject(trial)
    left = 0.8 * 0.25 - 0.125 + 0.8 * 0.5 - 0.375
    assert residual.weight == pytest.approx(left / (left + 0.2))


def test_deterministic_proposal_is_zeroed() -> None:
    residual = Residual(TARGET)
    assert residual.compute_acceptance(build_trial(2)) == pytest.approx(0.5)
    residual.reject(build_trial(2))
    assert residual.get_law().tolist() == pytest.approx([0.5, 0.5, 0])
    assert residual.compute_acceptance(build_trial(2)) == 0.0


def test_targets_law_is_left_alone() -> None:
    before = TARGET.copy()
    Residual(TARGET).reject(build_trial(2))
    assert TARGET.tolist() == before.tolist()


def test_measure_taken_whole_leaves_no_weight_and_no_child() -> None:
    residual = Residual(TARGET, 0.5)
    residual.reject(build_trial(0, [0.25, 0.25, 0.5]))
    assert residual.weight == 0.0
    assert residual.compute_acceptance(build_trial(2)) == 0.0


def test_float32_measure_taken_whole_leaves_nothing_by_rounding() -> None:
    target = np.array([0.10610136, 0.76461184, 0.12928674], dtype=np.float32)
    residual = Residual(target, 0.2133368182720536)
    residual.reject(build_trial(0, [0.56777091, 0.39868684, 0.03354225]))
    assert residual.weight == 0.0


def test_residual_that_rounds_to_nothing_keeps_the_last_one_without_rejected_tokens() -> None:
    trial = build_trial(0, TARGET.tolist())
    residual = Residual(TARGET)
    residual.reject(trial)
    assert residual.get_law().tolist() == pytest.approx([0, 1 / 3, 2 / 3])
    assert residual.compute_acceptance(build_trial(2)) == pytest.approx(2 / 3)


def test_residual_without_unrejected_tokens_stays_as_it_was() -> None:
    target = np.array([1.0, 0.0], dtype=np.float32)
    residual = Residual(target)
    residual.reject(build_trial(0, [1.0]))
    assert residual.get_law().tolist() == [1.0, 0.0]


def test_measure_emptied_by_rounding_falls_back_on_the_target_without_rejected_tokens() -> None:
    """The first rest is so small that its scale is inexact; the second proposal takes all of it."""
    target = np.array([0.5, 0.5 - 1e-9, 1e-9])
    residual = Residual(target)
    residual.reject(build_trial(0, [0.5 + 1e-12, 0.5 - 1e-9, 1e-9 - 1e-12]))
    residual.reject(build_trial(2))
    law = residual.get_law()
    assert law.tolist() == pytest.approx([0, 1, 0])


def test_law_reaching_beyond_the_vocabulary_counts_only_inside() -> None:
    residual = Residual(TARGET)
    trial = build_trial(4, [0.25, 0.25, 0.0, 0.0, 0.5])
    assert residual.compute_acceptance(trial) == 0.0
    residual.reject(trial)
    assert residual.get_law().tolist() == pytest.approx([0, 0, 1])


def test_law_without_mass_is_refused() -> None:
    with pytest.raises(NumericsError, match="sums to 0"):
        Residual(np.zeros(3, dtype=np.float32))


def test_many_small_shares_in_float32_keep_the_measure_exact() -> None:
    """Fifty proposals over 50,000 tokens: the measure stays within 1e-9 of exact arithmetic."""
    rng = np.random.default_rng(4)
    target = rng.exponential(size=50_000).astype(np.float32)
    target /= target.sum()
    residual = Residual(target)
    exact = target.astype(np.longdouble) / target.sum(dtype=np.longdouble)
    for _ in range(50):
        token_ids = np.sort(rng.choice(50_000, size=64, replace=False)).astype(np.int32)
        probs = rng.exponential(size=64)
        probs /= probs.sum()
        trial = Trial(
            token_id=int(token_ids[0]),
            node_idx=0,
            drafter_index=0,
            branch_idx=0,
            law=TrialLaw(token_ids=token_ids, probs=probs),
            is_sampled=True,
        )
        residual.reject(trial)
        exact[token_ids] = np.maximum(exact[token_ids] - probs, 0)
        exact /= exact.sum()
    assert float(np.abs(residual.get_law() - exact).sum()) < 1e-9
