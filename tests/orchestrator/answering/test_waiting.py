from __future__ import annotations

import pytest
from specrag_orchestrator.answering.waiting import DrafterPace, LatencyEstimate, WaitBounds

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


def test_pace_tells_the_way_from_the_work() -> None:
    pace = DrafterPace()
    for _ in range(60):
        pace.observe(0.09, draft_s=0.08, gamma=8)
    assert pace.reply_s == pytest.approx(0.01)
    assert pace.token_s == pytest.approx(0.01)
    assert pace.compute_wait(BOUNDS) == pytest.approx(0.09, abs=0.01)


def test_empty_proposal_says_nothing_of_the_time_a_token_takes() -> None:
    pace = DrafterPace()
    pace.observe(0.05, draft_s=0.04, gamma=4)
    before = pace.token_s
    pace.observe(0.004, draft_s=0.001, gamma=0)
    assert pace.token_s == before > 0
