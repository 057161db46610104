"""Toy target and drafters with random path-dependent tables, and one round of them as a procedure.

A round makes every random choice (each draft token, each acceptance, the final token) through the
chooser it is given, so that its exact output law can be enumerated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftLaw,
    DraftProposal,
    DraftSource,
    SiblingKind,
)
from specrag_inference.drafting import cap_law
from specrag_inference.sampling.history import TokenHistory
from specrag_inference.sampling.processors import compute_law
from specrag_inference.verification.chooser import Chooser
from specrag_inference.verification.enumeration import EnumeratingChooser, enumerate_outcomes
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions
from specrag_inference.verification.traversal import TraversalRule
from specrag_inference.verification.walk import choose_rule

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_inference.messages import SamplingParams

Law = NDArray[np.floating[Any]]
Prefix = tuple[int, ...]

ANSWER_LENGTH = 3
"""Tokens of the answers compared: the round's, then the target's own."""

PROMPT: Prefix = (1, 1)
"""What stands before the answer; only repetition penalties see it."""


class ToyModel:
    """Random logits for every prefix, made into laws by the production processors."""

    def __init__(
        self,
        *,
        seed: int,
        vocab_size: int,
        params: SamplingParams,
        dtype: type[np.float32] | type[np.float64] = np.float64,
        max_support: int | None = None,
        near: tuple[int, float] | None = None,
    ) -> None:
        """Make random tables; ``near`` = (seed of another model, distance) resembles that one."""
        self.vocab_size = vocab_size
        self._seed = seed
        self._params = params
        self._dtype = dtype
        self._max_support = max_support
        self._near = near
        self._committed: Prefix = ()
        self._laws: dict[Prefix, Law] = {}
        self._draft_laws: dict[Prefix, DraftLaw] = {}

    def law(self, prefix: Prefix) -> Law:
        """[vocab_size]: the processed law behind ``prefix``."""
        tokens = (*self._committed, *prefix)
        if tokens not in self._laws:
            history = TokenHistory.of(prompt_token_ids=PROMPT, answer_token_ids=tokens)
            logits: NDArray[Any] = self._make_logits(tokens).astype(self._dtype)
            self._laws[tokens] = compute_law(logits, self._params, history)
        return self._laws[tokens]

    def _make_logits(self, tokens: Prefix) -> Law:
        logits = _draw_logits(self._seed, tokens, self.vocab_size)
        if self._near is None:
            return logits
        seed, distance = self._near
        return _draw_logits(seed, tokens, self.vocab_size) + distance * logits

    def behind(self, committed: Prefix) -> ToyModel:
        """The same tables, seen from behind committed tokens."""
        model = copy(self)
        model._committed = (*self._committed, *committed)
        return model

    def draft_law(self, prefix: Prefix) -> DraftLaw:
        """The law as a drafter ships it: capped, renormalised, without zeros."""
        tokens = (*self._committed, *prefix)
        if tokens not in self._draft_laws:
            self._draft_laws[tokens] = cap_law(
                self.law(prefix), max_support=self._max_support or self.vocab_size
            )
        return self._draft_laws[tokens]


def _draw_logits(seed: int, tokens: Prefix, vocab_size: int) -> Law:
    rng = np.random.default_rng([seed, len(tokens), *tokens])
    logits: Law = rng.normal(scale=1.2, size=vocab_size)
    return logits


@dataclass
class TreeLaws:
    """The target's laws over a tree, for a walk."""

    target: ToyModel

    def law_at(self, node_idx: int, path: Sequence[int]) -> Law:
        return self.target.law(tuple(path))


Draft = Callable[[Chooser, list[DraftProposal]], DraftProposal]
"""(chooser, proposals made before) to one drafter's proposal."""


MakeRule = Callable[["TokenTree", Chooser, WalkOptions], VerificationRule]


def use(rule: Callable[[Chooser], VerificationRule]) -> MakeRule:
    """Use one rule whatever is declared."""
    return lambda _tree, chooser, _options: rule(chooser)


RULES: dict[str, MakeRule] = {
    "as chosen": choose_rule,
    "sequential": use(RejectionRule),
    "traversal": use(TraversalRule),
}


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: draft, merge, walk. The hooks are where wrong variants cut in."""

    target: ToyModel
    drafters: Sequence[Draft]
    max_draft_tokens: int = 64
    change_proposals: Callable[[list[DraftProposal]], list[DraftProposal]] = list
    change_tree: Callable[[TokenTree], TokenTree] = lambda tree: tree
    make_rule: MakeRule = RULES["sequential"]
    wrap_chooser: Callable[[EnumeratingChooser], Any] = lambda chooser: chooser
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    distrusted_drafters: frozenset[int] = field(default_factory=frozenset)

    def __call__(self, base: EnumeratingChooser) -> Prefix:
        """Return the committed tokens."""
        chooser = self.wrap_chooser(base)
        return self.verify(self.draft(chooser), chooser)

    def draft(self, chooser: Chooser) -> TokenTree:
        """Return the merged proposals."""
        proposals: list[DraftProposal] = []
        for draft in self.drafters:
            proposals.append(draft(chooser, proposals))
        return merge_proposals(
            self.change_proposals(proposals), max_draft_tokens=self.max_draft_tokens
        )

    def verify(self, tree: TokenTree, chooser: Chooser) -> Prefix:
        """Return the committed tokens of one tree."""
        tree = self.change_tree(tree)
        options = WalkOptions(
            position=0,
            stop_token_ids=self.stop_token_ids,
            distrusted_drafters=self.distrusted_drafters,
        )
        rule = self.make_rule(tree, chooser, options)
        result = rule.walk(tree, TreeLaws(self.target), options)
        accepted = tuple(int(tree.token_ids[node]) for node in result.path)
        return accepted if result.final_token is None else (*accepted, result.final_token)


class Uniforms(Protocol):
    """Where the random choices of a round that begins behind ``start`` tokens come from."""

    def drafting(self, start: int) -> Chooser: ...

    def deciding(self, start: int) -> Chooser: ...


@dataclass(frozen=True)
class Fresh:
    """Every choice is independent of all others."""

    base: EnumeratingChooser

    def drafting(self, start: int) -> Chooser:
        return self.base

    def deciding(self, start: int) -> Chooser:
        return self.base


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds until the answer is long enough; the draft length follows from earlier rounds."""

    target: ToyModel
    draft_models: Sequence[ToyModel]
    first_gamma: int = 1
    make_rule: MakeRule = choose_rule
    make_uniforms: Callable[[EnumeratingChooser], Uniforms] = Fresh

    def __call__(self, base: EnumeratingChooser) -> Prefix:
        """Return the committed tokens, cut to the length compared."""
        uniforms = self.make_uniforms(base)
        committed: Prefix = ()
        gamma = self.first_gamma
        while len(committed) < ANSWER_LENGTH:
            start = len(committed)
            round_ = Round(
                target=self.target.behind(committed),
                drafters=[
                    draft_iid(model.behind(committed), idx, num_branches=1, depth=gamma)
                    for idx, model in enumerate(self.draft_models)
                ],
                make_rule=self.make_rule,
            )
            tree = round_.draft(uniforms.drafting(start))
            tokens = round_.verify(tree, uniforms.deciding(start))
            gamma = 2 if len(tokens) > gamma else 1
            committed = (*committed, *tokens)
        return committed[:ANSWER_LENGTH]


def enumerate_trees(round_: Round) -> list[tuple[float, TokenTree]]:
    """Every tree that the round's drafters can propose, with its probability."""
    trees: dict[Hashable, tuple[float, TokenTree]] = {}
    for probability, tree in enumerate_outcomes(round_.draft):
        key = _identify(tree)
        before = trees[key][0] if key in trees else 0.0
        trees[key] = (before + probability, tree)
    return list(trees.values())


def _identify(tree: TokenTree) -> Hashable:
    """What tells two trees of one round apart: laws are functions of the tokens before them."""
    proposals = tuple(
        (one.node_idx, one.drafter_index, one.branch_idx, one.law is None) for one in tree.proposals
    )
    return tree.token_ids.tobytes(), tree.parent_idx.tobytes(), proposals


def enumerate_commits(
    round_: Round, trees: Sequence[tuple[float, TokenTree]]
) -> Iterator[tuple[float, Prefix]]:
    """Every commit that verifying one of the trees can end with, with its probability."""
    for probability, tree in trees:
        for conditional, tokens in enumerate_outcomes(partial(round_.verify, tree)):
            yield probability * conditional, tokens


def compute_commit_law(round_: Round, tree: TokenTree) -> dict[Prefix, float]:
    """The probability of every commit of one tree, but for those that rounding alone allows."""
    law = _gather(enumerate_commits(round_, [(1.0, tree)]))
    return {tokens: probability for tokens, probability in law.items() if probability > 1e-12}


def _gather(outcomes: Iterable[tuple[float, Prefix]]) -> dict[Prefix, float]:
    commits: dict[Prefix, float] = {}
    for probability, tokens in outcomes:
        commits[tokens] = commits.get(tokens, 0.0) + probability
    return commits


def _add_up(target: ToyModel, outcomes: Iterable[tuple[float, Prefix]]) -> NDArray[np.float64]:
    commits = _gather(outcomes)
    assert abs(sum(commits.values()) - 1.0) < 1e-5, "the enumerated choices do not sum to 1"
    law = np.zeros((target.vocab_size,) * ANSWER_LENGTH)
    for tokens, probability in commits.items():
        law[tokens[:ANSWER_LENGTH]] += probability * compute_continuation(target, tokens)
    return law


def compute_continuation(target: ToyModel, prefix: Prefix) -> NDArray[np.float64]:
    """[vocab_size] * (ANSWER_LENGTH - len(prefix)): the target's own law behind ``prefix``."""
    if len(prefix) >= ANSWER_LENGTH:
        return np.ones(())
    law = target.law(prefix).astype(np.float64)
    law /= law.sum()
    return np.stack(
        [
            law[token_id] * compute_continuation(target, (*prefix, token_id))
            for token_id in range(target.vocab_size)
        ]
    )


def compute_total_variation(
    procedure: Round | Rounds, trees: Sequence[tuple[float, TokenTree]] | None = None
) -> float:
    """Distance between the output law and the target's, over whole answers.

    Args:
        procedure: what makes the answers.
        trees: of a round, where they are enumerated already.
    """
    outcomes = (
        enumerate_outcomes(procedure)
        if trees is None or isinstance(procedure, Rounds)
        else enumerate_commits(procedure, trees)
    )
    law = _add_up(procedure.target, outcomes)
    difference = law - compute_continuation(procedure.target, ())
    return float(0.5 * np.abs(difference).sum())


def compute_p_value(target: ToyModel, answers: Sequence[Prefix]) -> float:
    """Chi-square of sampled answers against the target's law; rare answers are pooled."""
    expected = compute_continuation(target, ()) * len(answers)
    counts = Counter(answers)
    observed = np.array([counts[tokens] for tokens in np.ndindex(expected.shape)], dtype=float)
    flat = expected.ravel()
    if observed[flat == 0].any():
        return 0.0
    rare = flat < 5
    observed, flat = (np.append(values[~rare], values[rare].sum()) for values in (observed, flat))
    possible = flat > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(observed[possible], flat[possible]).pvalue)


def draft_iid(model: ToyModel, drafter_index: int, *, num_branches: int, depth: int = 2) -> Draft:
    """Independent chains from the model."""

    def draft(chooser: Chooser, _earlier: list[DraftProposal]) -> DraftProposal:
        branches = tuple(_draw_chain(chooser, model, (), depth) for _ in range(num_branches))
        return _propose(drafter_index, branches, gamma=depth)

    return draft


def draft_ending_early(
    model: ToyModel,
    drafter_index: int,
    *,
    num_branches: int,
    end: int = 0,
    state_gamma: bool = True,
) -> Draft:
    """Independent chains of two tokens that stop behind ``end``, as at the end of a text."""

    def draft(chooser: Chooser, _earlier: list[DraftProposal]) -> DraftProposal:
        chains = [_draw_chain(chooser, model, (), 2) for _ in range(num_branches)]
        branches = tuple(chain.cut(1) if chain.token_ids[0] == end else chain for chain in chains)
        return _propose(drafter_index, branches, gamma=2 if state_gamma else None)

    return draft


def draft_without_replacement(
    model: ToyModel, drafter_index: int, *, num_roots: int, num_children: int
) -> Draft:
    """Distinct first tokens, each with distinct second ones; base laws are stated."""

    def draft(chooser: Chooser, _earlier: list[DraftProposal]) -> DraftProposal:
        branches = []
        for first in _draw_distinct(chooser, model.draft_law(()), num_roots):
            law = model.draft_law((first,))
            branches += [
                _branch((first, second), (model.draft_law(()), law))
                for second in _draw_distinct(chooser, law, num_children)
            ]
        return _propose(drafter_index, tuple(branches), kind=SiblingKind.WITHOUT_REPLACEMENT)

    return draft


def draft_deterministic(
    tokens_of: Callable[[list[DraftProposal]], Sequence[Prefix]], drafter_index: int
) -> Draft:
    """Branches that may be any function of what was drawn before."""

    def draft(_chooser: Chooser, earlier: list[DraftProposal]) -> DraftProposal:
        branches = tuple(_branch(tokens, (None,) * len(tokens)) for tokens in tokens_of(earlier))
        return _propose(drafter_index, branches)

    return draft


def choose_greedy(model: ToyModel, *, num_branches: int = 1) -> Callable[..., list[Prefix]]:
    """The model's most likely chains, by first token."""

    def choose(_earlier: list[DraftProposal]) -> list[Prefix]:
        firsts = np.argsort(-model.law(()), kind="stable")[:num_branches]
        return [(int(first), int(np.argmax(model.law((int(first),))))) for first in firsts]

    return choose


def choose_by_looking(earlier: list[DraftProposal]) -> list[Prefix]:
    """The first sampled chain's tokens: as dependent on a draw as can be."""
    return [earlier[0].branches[0].token_ids]


def _draw_chain(chooser: Chooser, model: ToyModel, prefix: Prefix, depth: int) -> DraftBranch:
    tokens: Prefix = prefix
    laws = []
    for _ in range(depth):
        law = model.draft_law(tokens)
        laws.append(law)
        tokens = (*tokens, int(law.token_ids[chooser.draw(law.probs, position=len(tokens))]))
    return _branch(tokens, tuple(laws))


def _draw_distinct(chooser: Chooser, law: DraftLaw, count: int) -> list[int]:
    """Up to ``count`` distinct tokens, each drawn from what is left of the law."""
    probs = law.probs.copy()
    drawn = []
    for _ in range(min(count, len(probs))):
        idx = chooser.draw(probs, position=0)
        drawn.append(int(law.token_ids[idx]))
        probs[idx] = 0
    return drawn


def _branch(tokens: Prefix, laws: tuple[DraftLaw | None, ...]) -> DraftBranch:
    return DraftBranch(token_ids=tokens, laws=laws, source=DraftSource.MODEL)


def _propose(
    drafter_index: int,
    branches: tuple[DraftBranch, ...],
    *,
    kind: SiblingKind = SiblingKind.IID,
    gamma: int | None = None,
) -> DraftProposal:
    return DraftProposal(
        drafter_index=drafter_index,
        committed_length=0,
        branches=branches,
        sibling_kind=kind,
        gamma=gamma,
    )
