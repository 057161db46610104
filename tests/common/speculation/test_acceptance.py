"""The history of a drafter: what it estimates, how it fades, what it refuses."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.acceptance import AcceptanceHistory, RoundOutcome


def outcome(gamma: int, *accepted: int, nodes: int | None = None) -> RoundOutcome:
    """A round with one branch a rank, each of ``nodes`` tokens (all that were asked for)."""
    size = gamma if nodes is None else nodes
    return RoundOutcome(
        gamma=gamma, accepted_by_rank=accepted, nodes_by_rank=(size,) * len(accepted)
    )


def simulate(survival: list[float], gammas: list[int], num_rounds: int) -> AcceptanceHistory:
    """Observe rounds whose accepted lengths follow ``survival``, of the lengths given in turn."""
    rng = random.Random(3)
    history = AcceptanceHistory.begin()
    for idx in range(num_rounds):
        gamma, drawn = gammas[idx % len(gammas)], rng.random()
        reached = sum(drawn < share for share in survival[:gamma])
        history = history.fade(0).observe(outcome(gamma, reached))
    return history


def test_survival_is_estimated_by_depth_from_rounds_of_any_length() -> None:
    survival = [0.5, 0.45, 0.4, 0.36]
    estimated = simulate(survival, [1, 2, 4], 3000).compute_survival(4)
    assert estimated == pytest.approx(survival, abs=0.06)


def test_depths_never_tried_go_on_as_the_pooled_share_says() -> None:
    history = simulate([0.8], [1], 300)
    survival = history.compute_survival(3)
    assert survival[1] / survival[0] == pytest.approx(history.acceptance, abs=0.01)


def test_round_without_a_proposal_counts_as_rejected() -> None:
    history = AcceptanceHistory.begin()
    for _ in range(20):
        history = history.observe(RoundOutcome(gamma=4))
    assert history.acceptance < 0.1
    assert history.fill < 0.1


def test_what_is_drawn_is_expected_to_be_guessed_less_often() -> None:
    greedy, drawn = AcceptanceHistory.begin(0.0), AcceptanceHistory.begin(1.0)
    assert greedy.acceptance > drawn.acceptance > 0
    assert AcceptanceHistory.begin(2.0) == drawn


def test_past_fades_and_leaves_the_share() -> None:
    history = simulate([0.2], [1], 200)
    faded = history.fade(500)
    assert faded.acceptance == pytest.approx(history.acceptance)
    recovered = faded.observe(outcome(4, 4))
    assert recovered.acceptance > history.observe(outcome(4, 4)).acceptance + 0.2


def test_forks_count_for_what_they_add() -> None:
    history = AcceptanceHistory.begin()
    for idx in range(40):
        history = history.observe(outcome(4, 0, 2 * (idx % 2), nodes=3))
    gained, nodes = history.compute_fork(1)
    assert gained == pytest.approx(1.0, abs=0.1)
    assert nodes == pytest.approx(3.0, abs=0.1)
    assert history.compute_survival(1)[0] < 0.1, "the first branches' own share is apart"
    gained, _ = history.compute_fork(2)
    assert gained == pytest.approx(0.25 * history.acceptance), "never seen: the prior"


@given(
    rounds=st.lists(
        st.tuples(st.integers(1, 12), st.lists(st.integers(0, 12), max_size=6)), max_size=20
    )
)
def test_history_survives_being_written_down(rounds: list[tuple[int, list[int]]]) -> None:
    history = AcceptanceHistory.begin(0.3)
    for gamma, accepted in rounds:
        history = history.fade(3).observe(outcome(gamma, *(min(one, gamma) for one in accepted)))
    assert AcceptanceHistory.from_dict(history.to_dict()) == history
    survival = history.compute_survival(12)
    assert all(0 <= one <= 1 for one in survival)
    assert survival == sorted(survival, reverse=True)


@pytest.mark.parametrize(
    "change",
    [
        {"accepted.0": 9.0},
        {"tried.0": float("nan")},
        {"nodes": -1.0},
        {"tried.0": float("inf")},
        {"tried.0": 0.0, "accepted.0": 0.0},
    ],
)
def test_history_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    data = {**AcceptanceHistory.begin().to_dict(), **change}
    with pytest.raises(ValueError, match="not an acceptance history"):
        AcceptanceHistory.from_dict(data)


def test_history_of_another_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="not an acceptance history"):
        AcceptanceHistory.from_dict({"accepted": 1.0})


def test_more_accepted_than_asked_for_is_our_mistake() -> None:
    with pytest.raises(ValueError, match="num_accepted=3"):
        AcceptanceHistory.begin().observe(outcome(2, 3))
