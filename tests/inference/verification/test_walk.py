"""What the walk commits, tree by tree, and what it reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftLaw,
    DraftProposal,
    DraftSource,
    SiblingKind,
    VerificationMode,
)
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.sampling.processors import compute_law
from specrag_inference.verification import WalkResult, walk_tree

from tests.inference.verification.exact_cells import permute_nodes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VOCAB_SIZE = 8
MODES = list(VerificationMode)


class Counting:
    """A target that prefers token + 1, with a fixed probability."""

    def __init__(self, confidence: float = 1.0) -> None:
        self.confidence = confidence
        self.num_asked = 0

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        self.num_asked += 1
        law = np.full(VOCAB_SIZE, (1 - self.confidence) / (VOCAB_SIZE - 1), dtype=np.float32)
        law[((path[-1] if path else -1) + 1) % VOCAB_SIZE] = self.confidence
        return law


class FromLogits:
    """Laws made from logits: row 0 behind the committed tokens, row i + 1 behind node i."""

    def __init__(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        self._logits = logits
        self._params = params

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        return compute_law(self._logits[node_idx + 1], self._params)


def build_tree(*chains: tuple[int, ...], law: DraftLaw | None = None) -> TokenTree:
    return merge_proposals(
        [
            DraftProposal(
                drafter_index=idx,
                committed_length=0,
                branches=(
                    DraftBranch(
                        token_ids=chain, laws=(law,) * len(chain), source=DraftSource.MODEL
                    ),
                ),
            )
            for idx, chain in enumerate(chains)
        ],
        max_draft_tokens=100,
    )


def build_branches(*chains: tuple[int, ...], law: DraftLaw, kind: SiblingKind) -> TokenTree:
    """The chains as branches of one drafter."""
    branches = tuple(
        DraftBranch(token_ids=chain, laws=(law,) * len(chain), source=DraftSource.MODEL)
        for chain in chains
    )
    proposal = DraftProposal(
        drafter_index=1, committed_length=0, branches=branches, sibling_kind=kind
    )
    return merge_proposals([proposal], max_draft_tokens=100)


def walk(
    tree: TokenTree,
    laws: Any,
    mode: VerificationMode = VerificationMode.REJECTION,
    *,
    seed: int = 0,
    **options: Any,
) -> WalkResult:
    stream = RandomStream(random_key_from_seed(seed))
    return walk_tree(tree, laws, mode=mode, random=stream, position=0, **options)


def get_tokens(tree: TokenTree, result: WalkResult) -> list[int]:
    final = [] if result.final_token is None else [result.final_token]
    return [int(tree.token_ids[node]) for node in result.path] + final


@pytest.mark.parametrize("mode", MODES)
def test_empty_tree_decodes_one_bonus_token(mode: VerificationMode) -> None:
    result = walk(TokenTree.empty(), Counting(), mode)
    assert result.path == ()
    assert result.final_token == 0
    assert result.is_bonus


@pytest.mark.parametrize("mode", MODES)
def test_everything_right_is_accepted_with_a_bonus_token(mode: VerificationMode) -> None:
    tree = build_tree((0, 1, 2), (0, 1, 3), (5,))
    result = walk(tree, Counting(), mode)
    assert get_tokens(tree, result) == [0, 1, 2, 3]
    assert result.is_bonus


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wrong_at", range(4))
def test_rejection_at_any_depth_takes_the_token_of_that_row(
    mode: VerificationMode, wrong_at: int
) -> None:
    chain = tuple(6 if depth == wrong_at else depth for depth in range(4))
    tree = build_tree(chain)
    result = walk(tree, Counting(), mode)
    assert get_tokens(tree, result) == list(range(wrong_at + 1))
    assert not result.is_bonus


@pytest.mark.parametrize("mode", MODES)
def test_accepted_stop_token_ends_the_walk_without_a_final_token(mode: VerificationMode) -> None:
    laws = Counting()
    result = walk(build_tree((0, 1, 2)), laws, mode, stop_token_ids={1})
    assert len(result.path) == 2
    assert result.final_token is None
    assert not result.is_bonus
    assert len(result.logprobs) == 2
    assert laws.num_asked == 2


@pytest.mark.parametrize("mode", MODES)
def test_laws_are_asked_for_only_at_visited_nodes(mode: VerificationMode) -> None:
    laws = Counting()
    walk(build_tree((0, 1, 2), (3, 4, 5), (6, 7)), laws, mode)
    assert laws.num_asked == 4


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_the_targets_own(mode: VerificationMode) -> None:
    laws = Counting(confidence=0.9)
    tree = build_tree((0, 1, 2))
    for seed in range(20):
        result = walk(tree, laws, mode, seed=seed)
        tokens = get_tokens(tree, result)
        expected = [np.log(laws.law_at(0, tokens[:idx])[token]) for idx, token in enumerate(tokens)]
        assert result.logprobs == pytest.approx(expected)


@given(
    chains=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**40),
    mode=st.sampled_from(MODES),
    sampled=st.booleans(),
)
def test_node_order_changes_no_token(
    chains: list[tuple[int, ...]], seed: int, mode: VerificationMode, sampled: bool
) -> None:
    law = DraftLaw(token_ids=np.arange(4, dtype=np.int32), probs=np.full(4, 0.25, dtype=np.float32))
    tree = build_tree(*chains, law=law if sampled else None)
    permuted = permute_nodes(tree)
    laws = Counting(confidence=0.5)
    result, permuted_result = (walk(item, laws, mode, seed=seed) for item in (tree, permuted))
    assert get_tokens(tree, result) == get_tokens(permuted, permuted_result)
    assert result.logprobs == permuted_result.logprobs


@given(
    chains=st.lists(
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
    ),
    seed=st.integers(0, 2**40),
    kind=st.sampled_from(list(SiblingKind)),
)
def test_node_order_of_one_drafters_tree_changes_no_token(
    chains: list[tuple[int, ...]], seed: int, kind: SiblingKind
) -> None:
    law = DraftLaw(
        token_ids=np.arange(4, dtype=np.int32),
        probs=np.array([0.1, 0.2, 0.3, 0.4], dtype=np.float32),
    )
    tree = build_branches(*chains, law=law, kind=kind)
    permuted = permute_nodes(tree)
    laws = Counting(confidence=0.5)
    result, permuted_result = (walk(item, laws, seed=seed) for item in (tree, permuted))
    assert get_tokens(tree, result) == get_tokens(permuted, permuted_result)
    assert result.logprobs == permuted_result.logprobs


def test_token_outside_its_stated_support_is_reported_and_tried_as_deterministic() -> None:
    law = DraftLaw(
        token_ids=np.array([4, 5], dtype=np.int32), probs=np.array([0.5, 0.5], dtype=np.float32)
    )
    result = walk(build_tree((0,), (5,), law=law), Counting())
    assert result.violating_drafters == (0,)
    assert len(result.path) == 1


@pytest.mark.parametrize(
    ("token_ids", "probs"),
    [
        pytest.param([0, 1], [0.5, 0.2], id="does not sum to 1"),
        pytest.param([1, 0], [0.5, 0.5], id="not ascending"),
        pytest.param([0, 1], [1.5, -0.5], id="negative"),
        pytest.param([-1, 0], [0.5, 0.5], id="negative token id"),
        pytest.param([0, 1], [0.0, 1.0], id="token has no probability"),
        pytest.param([0, 1], [1.0], id="lengths differ"),
        pytest.param([], [], id="empty"),
    ],
)
def test_law_that_is_none_is_not_believed(token_ids: list[int], probs: list[float]) -> None:
    law = DraftLaw(
        token_ids=np.array(token_ids, dtype=np.int32), probs=np.array(probs, dtype=np.float32)
    )
    assert walk(build_tree((0,), law=law), Counting()).violating_drafters == (0,)


def test_distrusted_drafter_is_not_reported_again() -> None:
    law = DraftLaw(token_ids=np.array([4], dtype=np.int32), probs=np.ones(1, dtype=np.float32))
    result = walk(build_tree((0,), law=law), Counting(), distrusted_drafters={0})
    assert result.violating_drafters == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("mode", MODES)
def test_bad_target_row_fails_and_never_becomes_a_token(mode: VerificationMode, bad: float) -> None:
    logits = np.zeros((2, VOCAB_SIZE), dtype=np.float32)
    logits[0, 0] = 50.0
    logits[1, 3] = bad
    laws = FromLogits(logits, SamplingParams(temperature=1.0))
    with pytest.raises(NumericsError, match="not finite"):
        walk(build_tree((0,)), laws, mode)


def test_nan_in_a_proposals_law_fails() -> None:
    law = DraftLaw(
        token_ids=np.array([0, 1], dtype=np.int32),
        probs=np.array([np.nan, 0.5], dtype=np.float32),
    )
    with pytest.raises(NumericsError, match="draft law"):
        walk(build_tree((0,), law=law), Counting())


@pytest.mark.parametrize("mode", MODES)
def test_proposed_token_beyond_the_targets_vocabulary_is_rejected(mode: VerificationMode) -> None:
    law = DraftLaw(
        token_ids=np.array([0, VOCAB_SIZE + 3], dtype=np.int32),
        probs=np.array([0.5, 0.5], dtype=np.float32),
    )
    for stated in (law, None):
        result = walk(build_tree((VOCAB_SIZE + 3,), law=stated), Counting(), mode)
        assert result.path == ()
        assert result.final_token == 0


def test_greedy_target_needs_no_luck_with_sampled_proposals() -> None:
    law = DraftLaw(
        token_ids=np.arange(8, dtype=np.int32), probs=np.full(8, 0.125, dtype=np.float32)
    )
    tree = build_tree((3,), (0, 1, 7), (0, 2), law=law)
    for seed in range(10):
        assert get_tokens(tree, walk(tree, Counting(), seed=seed)) == [0, 1, 2]
