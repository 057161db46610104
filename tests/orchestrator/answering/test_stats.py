"""Counting tokens and times: the parts always add up to the whole."""

from __future__ import annotations

import numpy as np
import pytest
from specrag_common.speculation.proposals import SiblingKind
from specrag_common.speculation.token_tree import NodeProposal, TokenTree
from specrag_common.wire.rounds import RoundKey
from specrag_common.wire.verified import VerifiedTokens
from specrag_orchestrator.answering.stats import AnswerTally, DrafterTally, find_late_drafters

KEY = RoundKey(answer_id="a", round=0, drafter_index=0, committed_length=0, prefix_hash=0)


class Clock:
    """A clock that stands still unless moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def verified(num_tokens: int, *accepted: int, has_bonus: bool = False) -> VerifiedTokens:
    return VerifiedTokens(
        key=KEY,
        token_ids=(1,) * num_tokens,
        logprobs=(0.0,) * num_tokens,
        accepted_node_idx=accepted,
        has_bonus=has_bonus,
        end=None,
        stop_text_length=None,
        forward_time_us=0,
        is_last_of_round=True,
    )


def chain(*drafters: tuple[int, ...]) -> TokenTree:
    """Return a chain whose node i was proposed by ``drafters[i]``."""
    return TokenTree(
        token_ids=np.arange(len(drafters), dtype=np.int32),
        parent_idx=np.arange(-1, len(drafters) - 1, dtype=np.int32),
        proposals=tuple(
            NodeProposal(
                node_idx=idx,
                drafter_index=drafter,
                branch_idx=0,
                law=None,
                sibling_kind=SiblingKind.IID,
            )
            for idx, of_node in enumerate(drafters)
            for drafter in of_node
        ),
    )


def make(clock: Clock | None = None) -> AnswerTally:
    tally = AnswerTally(clock or Clock())
    for index in range(2):
        tally.drafters[index] = DrafterTally(drafter_index=index, address=f"d{index}")
    return tally


def test_parts_add_up_to_the_completion_tokens() -> None:
    tally = make()
    tree = chain((0,), (0, 1), (1,))
    tally.note_verified(verified(3, 0, 1), tree)  # two accepted, one residual
    tally.note_verified(verified(4, 0, 1, 2, has_bonus=True), tree)
    tally.note_verified(verified(2, 0, 1), chain((0,), (0,)))  # ended inside the path
    tally.note_verified(verified(1), TokenTree.empty())
    tally.note_verified(verified(1), None)
    stats = tally.build(num_retracted_chars=3)
    parts = (stats.num_accepted_tokens, stats.num_residual_tokens, stats.num_bonus_tokens)
    assert parts == (7, 1, 3)
    assert sum(parts) == tally.num_completion_tokens == 11
    assert stats.rounds == 5
    assert stats.mean_acceptance_length == pytest.approx(1 + 7 / 5)
    assert stats.num_draft_tokens == 4 + 4 + 2


def test_every_proposer_of_an_accepted_token_is_credited_once() -> None:
    tally = make()
    tally.note_verified(verified(3, 0, 1), chain((0,), (0, 1, 1), (1,)))
    first, second = tally.build(num_retracted_chars=0).per_drafter
    assert (first.num_draft_tokens, first.num_accepted_tokens) == (2, 2)
    assert (second.num_draft_tokens, second.num_accepted_tokens) == (3, 1)


def test_times_count_from_the_question() -> None:
    clock = Clock()
    tally = make(clock)
    clock.now += 0.1
    tally.note_speculation()
    clock.now += 0.4
    tally.note_prefilled(0.35)
    clock.now += 0.5
    tally.note_verified(verified(1), None)
    tally.note_commit()
    clock.now += 2.0
    tally.note_speculation()
    tally.note_verified(verified(4), None)
    tally.note_commit()
    clock.now += 1.0
    stats = tally.build(num_retracted_chars=0)
    assert stats.time_to_first_speculative_token_ms == pytest.approx(100)
    assert stats.time_to_first_token_ms == pytest.approx(1000)
    assert stats.prefill_ms == pytest.approx(350)
    assert stats.decode_ms == pytest.approx(2500)
    assert stats.total_ms == pytest.approx(4000)
    assert stats.tokens_per_s == pytest.approx(4 / 2.0)


def test_answer_of_one_round_has_a_rate_too() -> None:
    clock = Clock()
    tally = make(clock)
    tally.note_prefilled(0.0)
    clock.now += 0.5
    tally.note_verified(verified(5), None)
    assert tally.build(num_retracted_chars=0).tokens_per_s == pytest.approx(10)


def test_answer_that_never_began_has_only_zeros() -> None:
    stats = make().build(num_retracted_chars=0)
    assert (stats.rounds, stats.mean_acceptance_length, stats.tokens_per_s) == (0, 0.0, 0.0)
    assert (stats.time_to_first_token_ms, stats.decode_ms) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("num_late", "num_asked", "is_owing", "is_named"),
    [
        (0, 10, False, False),
        (1, 10, False, False),
        (1, 10, True, False),
        (1, 2, True, False),
        (2, 10, True, True),
        (3, 10, False, True),
    ],
)
def test_drafter_is_named_late_when_it_has_gone_silent_or_is_late_often(
    num_late: int, num_asked: int, is_owing: bool, is_named: bool
) -> None:
    tally = DrafterTally(
        drafter_index=0, address="d", num_late_rounds=num_late, num_asked_rounds=num_asked
    )
    assert find_late_drafters({0: tally}, [0] if is_owing else []) == ([0] if is_named else [])
