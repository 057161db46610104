import itertools

import numpy as np
import pytest

from bench.merging.coupled_rounds import SuffixSource
from bench.merging.rejection_rounds import compute_weights, draw_outcome, replay_rejection
from bench.merging.traces import DrafterTrace, TargetTrace

VOCAB = 4


def random_law(rng: np.random.Generator) -> np.ndarray:
    return rng.dirichlet(np.ones(VOCAB))


def enumerate_rule(
    target: np.ndarray, laws: list[np.ndarray], answer_idx: int
) -> tuple[np.ndarray, np.ndarray]:
    """Run the sequential rule over all proposals; mass by trial, and by (trial, later proposer)."""
    by_trial = np.zeros(len(laws) + 1)
    later = np.zeros((len(laws), len(laws)))
    for proposed in itertools.product(range(VOCAB), repeat=len(laws)):
        mass = float(np.prod([law[x] for law, x in zip(laws, proposed, strict=True)]))
        residual = target
        for trial, (law, x) in enumerate(zip(laws, proposed, strict=True)):
            if mass == 0:
                break
            accepted = min(1.0, residual[x] / law[x])
            if x == answer_idx:
                by_trial[trial] += mass * accepted
                for other in range(trial + 1, len(laws)):
                    later[trial, other] += mass * accepted * (proposed[other] == answer_idx)
            mass *= 1 - accepted
            left = np.maximum(residual - law, 0)
            residual = left / left.sum() if left.sum() > 0 else residual
        by_trial[-1] += mass * residual[answer_idx]
    return by_trial, later


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize("num_copies", [0, 1, 2])
def test_weights_equal_the_enumerated_rule(rng: np.random.Generator, num_copies: int) -> None:
    for _ in range(20):
        target = random_law(rng)
        laws = [random_law(rng), random_law(rng)]
        laws += [np.eye(VOCAB)[rng.integers(VOCAB)] for _ in range(num_copies)]
        for answer_idx in range(VOCAB):
            expected, _ = enumerate_rule(target, laws, answer_idx)
            weights = compute_weights(target, laws, answer_idx)
            assert weights == pytest.approx(expected, abs=1e-12)
            assert weights.sum() == pytest.approx(target[answer_idx], abs=1e-12)


def test_later_proposers_descend_as_often_as_in_the_enumerated_rule(
    rng: np.random.Generator,
) -> None:
    target = random_law(rng)
    laws = [random_law(rng), random_law(rng), np.eye(VOCAB)[1]]
    by_trial, later = enumerate_rule(target, laws, 1)
    trials = list(enumerate(laws))
    num_draws = 20_000
    counts = np.zeros((3, 3))
    for _ in range(num_draws):
        outcome = draw_outcome(target, trials, 1, rng)
        for name in outcome.descending[1:]:
            assert outcome.accepted is not None
            counts[outcome.accepted, name] += 1
    expected = later / by_trial.sum()
    assert counts / num_draws == pytest.approx(expected, abs=0.02)


def _make_traces(draft_law: np.ndarray, num_tokens: int) -> tuple[TargetTrace, DrafterTrace]:
    target_law = np.tile(np.array([0.25, 0.75], dtype=np.float32), (num_tokens, 1))
    answer = np.ones(num_tokens, dtype=np.int32)
    target = TargetTrace(
        prompt_ids=answer, greedy_ids=answer, sampled_ids=answer, sampled_laws=target_law
    )
    drafter = DrafterTrace(
        prompt_ids=answer,
        greedy_choices=answer[:, None],
        coupled_choices=answer[:, None],
        law_ids=np.tile(np.arange(2, dtype=np.int32), (num_tokens, 1)),
        law_probs=np.tile(draft_law.astype(np.float32), (num_tokens, 1)),
    )
    return target, drafter


def test_a_drafter_with_the_targets_law_is_always_accepted(rng: np.random.Generator) -> None:
    target, drafter = _make_traces(np.array([0.25, 0.75]), 18)
    tally = replay_rejection(target, [drafter], [], gamma=8, rng=rng)
    assert (tally.num_rounds, tally.num_tokens) == (2, 18)


def test_a_drafter_that_never_says_the_token_is_never_accepted(rng: np.random.Generator) -> None:
    target, drafter = _make_traces(np.array([1.0, 0.0]), 5)
    tally = replay_rejection(target, [drafter], [], gamma=8, rng=rng)
    assert (tally.num_rounds, tally.num_tokens) == (5, 5)


def test_a_copied_token_that_is_committed_was_accepted(rng: np.random.Generator) -> None:
    """A one-hot proposal of the committed token is the only trial that could have given it."""
    target, _ = _make_traces(np.array([1.0, 0.0]), 9)
    source = SuffixSource([1] * 30, [1] * 9, gamma=8)
    tally = replay_rejection(target, [], [source], gamma=8, rng=rng)
    assert (tally.num_rounds, tally.num_tokens) == (1, 9)
