from __future__ import annotations

import pytest
from specrag_orchestrator.answering.waiting import LatencyEstimate, WaitBounds

BOUNDS = WaitBounds(first_s=0.05, min_s=0.01, max_s=0.5)


def observe(*latencies_s: float) -> LatencyEstimate:
    estimate = LatencyEstimate()
    for latency_s in latencies_s:
        estimate = estimate.observe(latency_s)
    return estimate


def test_unknown_drafter_gets_the_longest_wait() -> None:
    assert LatencyEstimate().compute_wait(BOUNDS) == 0.5


def test_wait_is_mean_and_four_deviations() -> None:
    assert observe(0.02).compute_wait(BOUNDS) == pytest.approx(0.02 + 4 * 0.01)


def test_steady_drafter_is_waited_for_barely_longer_than_it_takes() -> None:
    assert observe(*[0.02] * 50).compute_wait(BOUNDS) == pytest.approx(0.02, abs=0.001)


def test_wait_stays_within_its_bounds() -> None:
    assert observe(*[0.0001] * 50).compute_wait(BOUNDS) == 0.01
    assert observe(3.0).compute_wait(BOUNDS) == 0.5
