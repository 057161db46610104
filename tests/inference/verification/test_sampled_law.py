"""REJECTION through production's own draws: drafting, merging, walking, round after round.

The exact test replaces the random numbers; this one uses them, so it sees a uniform that serves two
draws, in one round or across rounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.speculation.randomness import Purpose, RandomStream, random_key_from_seed
from specrag_inference.drafting import draw_draft_token
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.history import TokenHistory
from specrag_inference.sampling.processors import LawChain
from specrag_inference.verification import walk_tree

from tests.inference.verification.toy_worlds import (
    ANSWER_LENGTH,
    Prefix,
    ToyModel,
    compute_p_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

PARAMS = SamplingParams(temperature=1.0, top_p=0.9)
TARGET = ToyModel(seed=3, vocab_size=4, params=PARAMS, dtype=np.float32)
DRAFTERS = [ToyModel(seed=seed, vocab_size=4, params=PARAMS, dtype=np.float32) for seed in (41, 42)]
REJECTION = VerificationMode.REJECTION
NUM_ANSWERS = 2000


class Behind:
    """The target's laws behind tokens that are committed already."""

    def __init__(self, committed: Prefix) -> None:
        self._committed = committed

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        return TARGET.law((*self._committed, *path))


class OneUniform(RandomStream):
    """Wrong: forgets the purpose, so that drafting and accepting share their uniforms."""

    def uniform(self, purpose: Purpose, **key: int) -> float:
        return super().uniform(Purpose.DRAFT, **key)


def draft(
    model: ToyModel, stream: RandomStream, committed: Prefix, drafter_index: int
) -> DraftProposal:
    """Two independent branches of two tokens."""
    branches = []
    for branch_idx in range(2):
        tokens, laws = committed, []
        for _ in range(2):
            drawn = draw_draft_token(
                np.log(np.maximum(model.law(tokens), 1e-30)),
                LawChain(SamplingParams(temperature=1.0)),
                history=TokenHistory.of(answer_token_ids=tokens),
                mode=REJECTION,
                random=stream,
                drafter_index=drafter_index,
                branch_idx=branch_idx,
            )
            tokens = (*tokens, drawn.token_id)
            laws.append(drawn.law)
        branches.append(
            DraftBranch(
                token_ids=tokens[len(committed) :], laws=tuple(laws), source=DraftSource.MODEL
            )
        )
    return DraftProposal(
        drafter_index=drafter_index,
        committed_length=len(committed),
        branches=tuple(branches),
        gamma=2,
    )


def answer(seed: int, make_stream: Callable[[bytes], RandomStream]) -> Prefix:
    """Run rounds until the answer is long enough."""
    stream = make_stream(random_key_from_seed(seed))
    committed: Prefix = ()
    while len(committed) < ANSWER_LENGTH:
        tree = merge_proposals(
            [draft(model, stream, committed, idx) for idx, model in enumerate(DRAFTERS)],
            max_draft_tokens=7,
        )
        result = walk_tree(
            tree, Behind(committed), mode=REJECTION, random=stream, position=len(committed)
        )
        assert result.final_token is not None
        path = tuple(int(tree.token_ids[node]) for node in result.path)
        committed = (*committed, *path, result.final_token)
    return committed[:ANSWER_LENGTH]


@pytest.mark.statistical
def test_answers_follow_the_targets_law_over_keys() -> None:
    """Chi-square over whole answers; false-alarm rate 1e-4, seeds fixed."""
    answers = [answer(seed, RandomStream) for seed in range(NUM_ANSWERS)]
    assert compute_p_value(TARGET, answers) > 1e-4


@pytest.mark.statistical
def test_uniform_shared_between_purposes_is_caught() -> None:
    """The same chi-square must reject a sampler that drafts and accepts with one uniform."""
    answers = [answer(seed, OneUniform) for seed in range(NUM_ANSWERS)]
    assert compute_p_value(TARGET, answers) < 1e-9


def test_replay_with_the_same_key_gives_the_same_tokens() -> None:
    assert [answer(seed, RandomStream) for seed in range(20)] == [
        answer(seed, RandomStream) for seed in range(20)
    ]
