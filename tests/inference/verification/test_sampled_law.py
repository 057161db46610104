"""REJECTION through production's own draws: drafting, merging, walking, round after round.

The exact test replaces the random numbers; this one uses them, so it sees a uniform that serves two
draws, in one round or across rounds.
"""

from __future__ import annotations

from collections.abc import Callable
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

from tests.inference.verification.exact_cells import declare_deterministic
from tests.inference.verification.toy_worlds import (
    ANSWER_LENGTH,
    Prefix,
    ToyModel,
    compute_p_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

PARAMS = SamplingParams(temperature=1.0, top_p=0.9)
TARGET = ToyModel(seed=3, vocab_size=4, params=PARAMS, dtype=np.float32)
DRAFTERS = [ToyModel(seed=seed, vocab_size=4, params=PARAMS, dtype=np.float32) for seed in (41, 42)]
REJECTION = VerificationMode.REJECTION
NUM_ANSWERS = 1500

MakeProposals = Callable[[RandomStream, Prefix], list[DraftProposal]]


class Behind:
    """The target's laws behind tokens that are committed already."""

    def __init__(self, committed: Prefix) -> None:
        self._committed = committed

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        return TARGET.law((*self._committed, *path))


class OneUniform(RandomStream):
    """Wrong: forgets the purpose, so that drafting and accepting share their uniforms."""

    def uniform(self, purpose: Purpose, **key: int) -> float:
        return super().uniform(Purpose.DRAFT, **(key | {"trial": 0}))


class Recording(RandomStream):
    """Notes the key of every uniform."""

    def __init__(self, random_key: bytes) -> None:
        super().__init__(random_key)
        self.keys: list[tuple[Purpose, frozenset[tuple[str, int]]]] = []

    def uniform(self, purpose: Purpose, **key: int) -> float:
        self.keys.append((purpose, frozenset(item for item in key.items() if item[1])))
        return super().uniform(purpose, **key)


def draft(
    model: ToyModel,
    stream: RandomStream,
    committed: Prefix,
    drafter_index: int,
    *,
    num_branches: int = 2,
    gamma: int = 2,
) -> DraftProposal:
    """Independent branches."""
    branches = []
    for branch_idx in range(num_branches):
        tokens, laws = committed, []
        for _ in range(gamma):
            drawn = draw_draft_token(
                np.log(np.maximum(model.law(tokens), 1e-30)),
                LawChain(SamplingParams(temperature=1.0)),
                history=TokenHistory.of(answer_token_ids=committed, path=tokens[len(committed) :]),
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
        gamma=gamma,
    )


def draft_chain(stream: RandomStream, committed: Prefix) -> list[DraftProposal]:
    """One drafter's single branch: verified as a block."""
    return [draft(DRAFTERS[0], stream, committed, 0, num_branches=1, gamma=3)]


def draft_trees(stream: RandomStream, committed: Prefix) -> list[DraftProposal]:
    """Two branches of each drafter."""
    return [draft(model, stream, committed, idx) for idx, model in enumerate(DRAFTERS)]


def draft_by_turns(stream: RandomStream, committed: Prefix) -> list[DraftProposal]:
    """Another shape, and so perhaps another rule, each round."""
    turn = len(committed) % 5
    if turn == 0:
        return []
    if turn == 1:
        return draft_chain(stream, committed)
    if turn == 2:
        return [draft(DRAFTERS[0], stream, committed, 0, gamma=4)]
    proposals = draft_trees(stream, committed)
    return proposals if turn == 3 else declare_deterministic(proposals)


def answer(
    stream: RandomStream,
    make_proposals: MakeProposals = draft_trees,
    *,
    length: int = ANSWER_LENGTH,
) -> Prefix:
    """Run rounds until the answer is long enough."""
    committed: Prefix = ()
    while len(committed) < length:
        tree = merge_proposals(make_proposals(stream, committed), max_draft_tokens=7)
        result = walk_tree(
            tree, Behind(committed), mode=REJECTION, random=stream, position=len(committed)
        )
        assert result.final_token is not None
        path = tuple(int(tree.token_ids[node]) for node in result.path)
        committed = (*committed, *path, result.final_token)
    return committed[:length]


def answers(
    make_stream: Callable[[bytes], RandomStream],
    make_proposals: MakeProposals,
    *,
    num_answers: int = NUM_ANSWERS,
) -> list[Prefix]:
    return [
        answer(make_stream(random_key_from_seed(seed)), make_proposals)
        for seed in range(num_answers)
    ]


@pytest.mark.statistical
@pytest.mark.parametrize("make_proposals", [draft_chain, draft_trees])
def test_answers_follow_the_targets_law_over_keys(make_proposals: MakeProposals) -> None:
    """Chi-square over whole answers; false-alarm rate 1e-4, seeds fixed."""
    assert compute_p_value(TARGET, answers(RandomStream, make_proposals)) > 1e-4


@pytest.mark.statistical
@pytest.mark.parametrize("make_proposals", [draft_chain, draft_trees])
def test_uniform_shared_between_purposes_is_caught(make_proposals: MakeProposals) -> None:
    """The same chi-square must reject a sampler that drafts and accepts with one uniform."""
    assert compute_p_value(TARGET, answers(OneUniform, make_proposals)) < 1e-9


@pytest.mark.parametrize("make_proposals", [draft_chain, draft_trees, draft_by_turns])
def test_no_uniform_serves_two_decisions(make_proposals: MakeProposals) -> None:
    """Also across rounds: a block or tree is decided about behind the token it ends with."""
    for seed in range(40):
        stream = Recording(random_key_from_seed(seed))
        answer(stream, make_proposals, length=12)
        assert len(set(stream.keys)) == len(stream.keys)


@pytest.mark.parametrize("make_proposals", [draft_chain, draft_trees, draft_by_turns])
def test_replay_with_the_same_key_gives_the_same_tokens(make_proposals: MakeProposals) -> None:
    first, second = (answers(RandomStream, make_proposals, num_answers=20) for _ in range(2))
    assert first == second
