"""Walks over SAMPLED proposals, rule by rule: forced rejections, stop tokens, numerics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import DraftBranch, DraftLaw, DraftProposal, DraftSource
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.verification.block import BlockRule
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions, WalkResult
from specrag_inference.verification.traversal import TraversalRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_inference.verification.chooser import Chooser, TrialKey

VOCAB_SIZE = 6
CHAIN = (0, 1, 2, 3)
RULES: list[Callable[[Chooser], VerificationRule]] = [RejectionRule, BlockRule, TraversalRule]
UPWARDS: list[Callable[[Chooser], VerificationRule]] = [BlockRule, TraversalRule]

Rule = Any


@dataclass
class Scripted:
    """Accepts at the positions named and draws the likeliest token; keeps what it was asked."""

    accepted: frozenset[int] = frozenset()
    chances: dict[int, float] = field(default_factory=dict)
    keys: list[TrialKey] = field(default_factory=list)
    drawn_from: list[NDArray[np.floating[Any]]] = field(default_factory=list)
    drawn_at: list[int] = field(default_factory=list)

    def accept(self, probability: float, key: TrialKey) -> bool:
        self.chances[key.position] = probability
        self.keys.append(key)
        return probability > 0.0 and key.position in self.accepted

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:
        self.drawn_from.append(law)
        self.drawn_at.append(position)
        return int(np.argmax(law))


class Rows:
    """A target with another random law behind every number of tokens; counts its rows."""

    def __init__(self, bad_row: int | None = None, bad: float = np.nan) -> None:
        rng = np.random.default_rng(193)
        self.rows = rng.dirichlet(np.full(VOCAB_SIZE, 2.0), size=len(CHAIN) + 1)
        if bad_row is not None:
            self.rows[bad_row, 4] = bad
        self.asked: list[int] = []

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        self.asked.append(len(path))
        row: NDArray[np.float32] = self.rows[len(path)].astype(np.float32)
        return row


def build_draft_laws() -> NDArray[np.float64]:
    """[num_tokens, vocab_size]: laws that make the weights fall and rise again."""
    rng = np.random.default_rng([193, 1])
    laws: NDArray[np.float64] = rng.dirichlet(np.full(VOCAB_SIZE, 2.0), size=len(CHAIN))
    return laws


def build_chain(*, bad_law: int | None = None, tokens: tuple[int, ...] = CHAIN) -> TokenTree:
    laws = [
        DraftLaw(token_ids=np.arange(VOCAB_SIZE, dtype=np.int32), probs=probs.astype(np.float32))
        for probs in build_draft_laws()
    ]
    if bad_law is not None:
        laws[bad_law].probs[5] = np.nan
    branch = DraftBranch(token_ids=tokens, laws=tuple(laws), source=DraftSource.MODEL)
    proposal = DraftProposal(drafter_index=2, committed_length=0, branches=(branch,))
    return merge_proposals([proposal], max_draft_tokens=100)


def walk(
    rule: Rule,
    chooser: Scripted,
    laws: Rows | None = None,
    tree: TokenTree | None = None,
    **kw: Any,
) -> WalkResult:
    options = WalkOptions(position=kw.pop("position", 0), **kw)
    result: WalkResult = rule(chooser).walk(tree or build_chain(), laws or Rows(), options)
    return result


def compute_weights() -> list[float]:
    """The block weights of the chain's prefixes, from the definition."""
    target, draft = Rows().rows, build_draft_laws()
    weights = [1.0]
    for depth, token in enumerate(CHAIN):
        weights.append(min(1.0, weights[-1] * target[depth, token] / draft[depth, token]))
    return weights


@pytest.mark.parametrize("num_accepted", range(len(CHAIN) + 1))
@pytest.mark.parametrize("rule", UPWARDS)
def test_token_behind_each_prefix_comes_from_that_prefixs_row(
    rule: Rule, num_accepted: int
) -> None:
    chooser = Scripted(accepted=frozenset({num_accepted - 1}))
    result = walk(rule, chooser)
    target, draft, weights = Rows().rows, build_draft_laws(), compute_weights()
    expected = target[num_accepted]
    if num_accepted < len(CHAIN):
        expected = np.maximum(weights[num_accepted] * expected - draft[num_accepted], 0)
    assert len(result.path) == num_accepted
    assert result.is_bonus == (num_accepted == len(CHAIN))
    assert chooser.drawn_from[0] == pytest.approx(expected / expected.sum(), abs=1e-6)
    assert chooser.drawn_at == [num_accepted]


@pytest.mark.parametrize("num_accepted", range(len(CHAIN) + 1))
def test_sequential_rejection_at_each_position_draws_from_that_row(num_accepted: int) -> None:
    chooser = Scripted(accepted=frozenset(range(num_accepted)))
    result = walk(RejectionRule, chooser)
    expected = Rows().rows[num_accepted]
    if num_accepted < len(CHAIN):
        expected = np.maximum(expected - build_draft_laws()[num_accepted], 0)
    assert len(result.path) == num_accepted
    assert chooser.drawn_from[0] == pytest.approx(expected / expected.sum(), abs=1e-6)


@pytest.mark.parametrize("rule", UPWARDS)
def test_every_prefix_is_tried_with_its_chance_from_the_longest_on(rule: Rule) -> None:
    chooser = Scripted()
    walk(rule, chooser)
    target, draft, weights = Rows().rows, build_draft_laws(), compute_weights()
    expected = {len(CHAIN) - 1: weights[-1]}
    for length in range(1, len(CHAIN)):
        left = np.maximum(weights[length] * target[length] - draft[length], 0).sum()
        expected[length - 1] = left / (left + 1 - weights[length])
    assert [key.position for key in chooser.keys] == [3, 2, 1, 0]
    assert chooser.chances == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", UPWARDS)
def test_keys_name_position_drafter_branch_and_round(rule: Rule) -> None:
    first, second = Scripted(), Scripted()
    walk(rule, first, position=10)
    walk(rule, second, position=12)
    assert {(key.drafter_index, key.branch_idx) for key in first.keys} == {(2, 0)}
    assert {key.position for key in first.keys} == {10, 11, 12, 13}
    assert not set(first.keys) & set(second.keys)
    assert min(key.trial for key in first.keys) > 1000, "no ordinal of a trial at a node"


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_the_targets_own(rule: Rule) -> None:
    result = walk(rule, Scripted(accepted=frozenset({0, 1})))
    assert len(result.path) == 2
    assert result.final_token is not None
    tokens = [*CHAIN[:2], result.final_token]
    expected = [np.log(Rows().rows[depth, token]) for depth, token in enumerate(tokens)]
    assert result.logprobs == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_chain_ends_with_an_accepted_stop_token_and_nothing_is_drawn(rule: Rule) -> None:
    chooser, laws = Scripted(accepted=frozenset(range(4))), Rows()
    result = walk(rule, chooser, laws, stop_token_ids={2})
    assert len(result.path) == 3
    assert result.final_token is None
    assert not result.is_bonus
    assert len(result.logprobs) == 3
    assert not chooser.drawn_at
    assert laws.asked == [0, 1, 2]


@pytest.mark.parametrize("rule", UPWARDS)
def test_stop_token_that_is_not_accepted_leaves_the_shorter_prefixes(rule: Rule) -> None:
    result = walk(rule, Scripted(accepted=frozenset({0})), stop_token_ids={2})
    assert len(result.path) == 1
    assert result.final_token is not None


@pytest.mark.parametrize("rule", UPWARDS)
def test_rows_behind_an_impossible_token_are_not_asked_for(rule: Rule) -> None:
    laws = Rows()
    laws.rows[1, CHAIN[1]] = 0.0
    laws.rows[1] /= laws.rows[1].sum()
    result = walk(rule, Scripted(accepted=frozenset({0, 1, 2, 3})), laws)
    assert laws.asked == [0, 1]
    assert len(result.path) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("bad_row", range(len(CHAIN) + 1))
@pytest.mark.parametrize("rule", RULES)
def test_bad_target_row_fails_and_never_becomes_a_token(
    rule: Rule, bad_row: int, bad: float
) -> None:
    chooser = Scripted(accepted=frozenset(range(4)))
    with pytest.raises(NumericsError, match="the target's law"):
        walk(rule, chooser, Rows(bad_row, bad))
    assert not chooser.drawn_at


@pytest.mark.parametrize("bad_law", range(len(CHAIN)))
@pytest.mark.parametrize("rule", RULES)
def test_nan_in_a_proposals_law_fails(rule: Rule, bad_law: int) -> None:
    chooser = Scripted(accepted=frozenset(range(4)))
    with pytest.raises(NumericsError, match="draft law"):
        walk(rule, chooser, tree=build_chain(bad_law=bad_law))
    assert not chooser.drawn_at


def test_block_refuses_a_fork() -> None:
    branch = DraftBranch(token_ids=(0,), laws=(None,), source=DraftSource.MODEL)
    tree = merge_proposals(
        [DraftProposal(drafter_index=0, committed_length=0, branches=(branch, branch))],
        max_draft_tokens=9,
    )
    with pytest.raises(ValueError, match="too many values"):
        walk(BlockRule, Scripted(), tree=tree)
