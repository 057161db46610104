"""COUPLED: tokens depend on the seed and the target alone, and follow its law over seeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_inference.messages import SamplingParams
from specrag_inference.verification import walk_tree
from specrag_inference.verification.coupled import choose_coupled

from tests.inference.verification.coupled_cells import compare_with_alone
from tests.inference.verification.exact_cells import PROCESSORS
from tests.inference.verification.toy_worlds import (
    ANSWER_LENGTH,
    Prefix,
    ToyModel,
    compute_p_value,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from specrag_common.speculation.token_tree import TokenTree

PARAMS = SamplingParams(temperature=1.0, top_p=0.95)
TARGET = ToyModel(seed=5, vocab_size=4, params=PARAMS, dtype=np.float32)
COUPLED = VerificationMode.COUPLED


class Behind:
    """The target's laws behind tokens that are committed already."""

    def __init__(self, committed: Prefix, target: ToyModel = TARGET) -> None:
        self._committed = committed
        self._target = target

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        return self._target.law((*self._committed, *path))


def build_tree(chains: list[Prefix], committed_length: int) -> TokenTree:
    branches = tuple(
        DraftBranch(token_ids=chain, laws=(None,) * len(chain), source=DraftSource.MODEL)
        for chain in chains
    )
    proposal = DraftProposal(drafter_index=0, committed_length=committed_length, branches=branches)
    return merge_proposals([proposal], max_draft_tokens=100)


def answer(
    seed: int, trees: list[list[Prefix]], num_tokens: int, target: ToyModel = TARGET
) -> Prefix:
    """Run rounds with the given trees (empty ones when they run out) until enough is committed."""
    stream = RandomStream(random_key_from_seed(seed))
    committed: Prefix = ()
    for idx in range(num_tokens):
        if len(committed) >= num_tokens:
            break
        tree = build_tree(trees[idx] if idx < len(trees) else [], len(committed))
        result = walk_tree(
            tree, Behind(committed, target), mode=COUPLED, random=stream, position=len(committed)
        )
        assert result.final_token is not None
        path = tuple(int(tree.token_ids[node]) for node in result.path)
        committed = (*committed, *path, result.final_token)
    return committed[:num_tokens]


chains: st.SearchStrategy[list[Prefix]] = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), min_size=0, max_size=6
)


@given(seed=st.integers(-(2**70), 2**70), trees=st.lists(chains, max_size=4))
def test_tokens_do_not_depend_on_any_tree(seed: int, trees: list[list[Prefix]]) -> None:
    assert answer(seed, trees, 6) == answer(seed, [], 6)


def test_right_guess_is_accepted_whole() -> None:
    alone = answer(11, [], 6)
    stream = RandomStream(random_key_from_seed(11))
    tree = build_tree([alone[:5]], 0)
    result = walk_tree(tree, Behind(()), mode=COUPLED, random=stream, position=0)
    assert len(result.path) == 5
    assert result.final_token == alone[5]


@pytest.mark.parametrize("processor", list(PROCESSORS))
@pytest.mark.parametrize("kind", ["two branches and a drafter", "children without replacement"])
def test_no_tree_that_can_be_drafted_changes_a_token(kind: str, processor: str) -> None:
    cell = compare_with_alone(kind, processor, range(3))
    assert cell.num_walks > 0
    assert cell.num_different == 0


@pytest.mark.statistical
@pytest.mark.parametrize("processor", list(PROCESSORS))
def test_processed_answers_follow_the_targets_law_over_seeds(processor: str) -> None:
    """Chi-square over whole answers; false-alarm rate 1e-4 each, seeds fixed."""
    params, _ = PROCESSORS[processor]
    target = ToyModel(seed=5, vocab_size=4, params=params, dtype=np.float32)
    guess: list[list[Prefix]] = [[(0, 1, 2), (1, 1)], [(2,)]]
    answers = [answer(seed, guess, ANSWER_LENGTH, target) for seed in range(1500)]
    assert compute_p_value(target, answers) > 1e-4


@pytest.mark.statistical
def test_answers_follow_the_targets_law_over_seeds() -> None:
    """Chi-square over whole answers; false-alarm rate 1e-4, seeds fixed.

    The biased sampler (the Gumbel variables of position 0 used at every position) must be caught.
    """
    num_seeds = 2500
    guess: list[list[Prefix]] = [[(0, 1, 2), (1, 1)], [(2,)]]
    answers = [answer(seed, guess, ANSWER_LENGTH) for seed in range(num_seeds)]
    assert compute_p_value(TARGET, answers) > 1e-4
    biased = [answer_with_one_position(seed) for seed in range(num_seeds)]
    assert compute_p_value(TARGET, biased) < 1e-9


def answer_with_one_position(seed: int) -> Prefix:
    stream = RandomStream(random_key_from_seed(seed))
    committed: Prefix = ()
    for _ in range(ANSWER_LENGTH):
        committed = (*committed, choose_coupled(TARGET.law(committed), stream, position=0))
    return committed
