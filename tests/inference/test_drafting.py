"""A draft token is drawn from the very numbers that are shipped."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_inference.drafting import MAX_LAW_SUPPORT, DrawnToken, cap_law, draw_draft_token
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.history import TokenHistory
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.sampling.processors import LawChain, compute_law
from specrag_inference.verification.coupled import choose_coupled

LOGITS = np.random.default_rng(1).normal(scale=2.0, size=500).astype(np.float32)
SAMPLED = SamplingParams(temperature=1.0)


def draw(
    seed: int = 0, params: SamplingParams = SAMPLED, position: int = 0, **options: Any
) -> DrawnToken:
    defaults: dict[str, Any] = {
        "logits": LOGITS,
        "chain": LawChain(params),
        "history": TokenHistory.of(answer_token_ids=[0] * position),
        "mode": VerificationMode.REJECTION,
        "drafter_index": 0,
        "branch_idx": 0,
    }
    stream = RandomStream(random_key_from_seed(seed))
    return draw_draft_token(random=stream, **(defaults | options))


def test_shipped_law_is_capped_ascending_float32_and_sums_to_one() -> None:
    law = draw().law
    assert law is not None
    assert len(law.token_ids) == MAX_LAW_SUPPORT
    assert law.token_ids.dtype == np.int32
    assert law.probs.dtype == np.float32
    assert (np.diff(law.token_ids) > 0).all()
    assert (law.probs > 0).all()
    assert float(law.probs.sum(dtype=np.float64)) == pytest.approx(1.0, abs=1e-6)


def test_shipped_law_holds_only_what_the_processors_left() -> None:
    law = draw(params=SamplingParams(temperature=0.8, top_k=5)).law
    assert law is not None
    assert law.token_ids.tolist() == sorted(np.argsort(-LOGITS)[:5])


@pytest.mark.statistical
def test_tokens_follow_the_shipped_law_over_positions() -> None:
    """Chi-square, false-alarm rate 1e-4, seed fixed; the uncapped law must be told apart."""
    params = SamplingParams(temperature=3.0)
    drawn = [draw(position=position, params=params) for position in range(6000)]
    law = drawn[0].law
    assert law is not None
    counts = Counter(token.token_id for token in drawn)
    observed = np.array([counts[token_id] for token_id in law.token_ids.tolist()], dtype=float)
    assert observed.sum() == len(drawn)
    probs = law.probs.astype(np.float64)
    expected = probs / probs.sum() * len(drawn)
    assert stats.chisquare(observed, expected).pvalue > 1e-4
    uncapped = compute_law(LOGITS, params).astype(np.float64)[law.token_ids] * len(drawn)
    outside = np.array([0.0]), np.array([len(drawn) - uncapped.sum()])
    statistic = ((np.append(observed, outside[0]) - np.append(uncapped, outside[1])) ** 2) / (
        np.append(uncapped, outside[1])
    )
    assert stats.chi2.sf(statistic.sum(), len(observed)) < 1e-9


def test_branches_and_drafters_draw_independently() -> None:
    tokens = [
        draw(branch_idx=branch, drafter_index=drafter, params=SamplingParams(temperature=3.0))
        for branch in range(4)
        for drafter in range(4)
    ]
    assert len({token.token_id for token in tokens}) > 8
    assert draw(branch_idx=3).token_id == draw(branch_idx=3).token_id


def test_greedy_token_is_deterministic_and_ranks_follow() -> None:
    order = np.argsort(-LOGITS, kind="stable")
    for mode in VerificationMode:
        drawn = [draw(params=SamplingParams(), mode=mode, rank=rank) for rank in range(4)]
        assert [token.token_id for token in drawn] == order[:4].tolist()
        assert all(token.law is None for token in drawn)


def test_coupled_token_is_the_targets_when_the_laws_agree() -> None:
    for position in range(50):
        token = draw(mode=VerificationMode.COUPLED, position=position)
        stream = RandomStream(random_key_from_seed(0))
        law = compute_law(LOGITS, SAMPLED)
        assert token.law is None
        assert token.token_id == choose_coupled(law, stream, position=position)


@pytest.mark.parametrize("mode", list(VerificationMode))
def test_greedy_ranks_are_taken_behind_penalties(mode: VerificationMode) -> None:
    best, second, third = np.argsort(-LOGITS, kind="stable")[:3].tolist()
    params = SamplingParams(presence_penalty=2.0, logit_bias=((second, -100.0),))
    history = TokenHistory.of(path=[best])
    penalised = LOGITS.copy()
    penalised[best] -= np.float32(2.0)
    penalised[second] -= np.float32(100.0)
    order = np.argsort(-penalised, kind="stable").tolist()
    drawn = [draw(params=params, mode=mode, rank=rank, history=history) for rank in range(3)]
    assert [token.token_id for token in drawn] == order[:3]
    assert third in order[:2]


def test_shipped_law_sees_the_branch_so_far() -> None:
    best = int(np.argmax(LOGITS))
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5, top_k=20)
    laws = [
        draw(params=params, history=TokenHistory.of(path=[best] * count)).law for count in range(3)
    ]
    shares = [0.0 if law is None else float(law.probs[law.token_ids == best].sum()) for law in laws]
    assert shares[0] > shares[1] > shares[2]


def test_coupled_token_is_the_targets_behind_the_same_history() -> None:
    params = SamplingParams(temperature=1.0, repetition_penalty=1.7, min_p=0.05)
    for position in range(20):
        history = TokenHistory.of(prompt_token_ids=[7, 9], answer_token_ids=range(position))
        token = draw(params=params, mode=VerificationMode.COUPLED, history=history)
        law = compute_law(LOGITS, params, history)
        stream = RandomStream(random_key_from_seed(0))
        assert token.token_id == choose_coupled(law, stream, position=position)


def test_end_tokens_are_not_drafted_while_the_answer_is_too_short() -> None:
    best = int(np.argmax(LOGITS))
    params = SamplingParams(min_tokens=2, stop_token_ids=frozenset({best}))
    drawn = [
        draw(params=params, history=TokenHistory.of(answer_token_ids=[3], path=path)).token_id
        for path in ((), (4,))
    ]
    assert drawn[0] != best
    assert drawn[1] == best


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=1.0, top_k=2)])
def test_coupled_ranks_are_distinct_even_behind_the_laws_support(params: SamplingParams) -> None:
    tokens = [
        draw(mode=VerificationMode.COUPLED, params=params, rank=rank).token_id for rank in range(6)
    ]
    assert len(set(tokens)) == 6


def test_coupled_tokens_do_not_depend_on_drafter_or_branch() -> None:
    tokens = {
        draw(mode=VerificationMode.COUPLED, drafter_index=drafter, branch_idx=branch).token_id
        for drafter in range(3)
        for branch in range(3)
    }
    assert len(tokens) == 1


def test_cap_keeps_the_dtype_and_the_lowest_ids_on_ties() -> None:
    law = cap_law(np.full(6, 1 / 6), max_support=4)
    assert law.token_ids.tolist() == [0, 1, 2, 3]
    assert law.probs.tolist() == [0.25] * 4


def test_bad_logits_fail() -> None:
    with pytest.raises(NumericsError):
        draw(logits=np.array([0.0, np.nan], dtype=np.float32))


@pytest.mark.parametrize("rank", [-1, 500])
def test_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank={rank}"):
        draw(rank=rank)
