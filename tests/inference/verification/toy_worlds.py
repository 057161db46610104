"""Toy target and drafters with random path-dependent tables, and one round of them as a procedure.

A round makes every random choice (each draft token, each acceptance, the final token) through the
chooser it is given, so that its exact output law can be enumerated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
from specrag_inference.sampling.processors import compute_law
from specrag_inference.verification.chooser import Chooser
from specrag_inference.verification.enumeration import EnumeratingChooser, enumerate_outcomes
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_inference.messages import SamplingParams

Law = NDArray[np.floating[Any]]
Prefix = tuple[int, ...]

ANSWER_LENGTH = 3
"""Tokens of the answers compared: the round's, then the target's own."""


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
    ) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._params = params
        self._dtype = dtype
        self._max_support = max_support
        self._committed: Prefix = ()
        self._laws: dict[Prefix, Law] = {}
        self._draft_laws: dict[Prefix, DraftLaw] = {}

    def law(self, prefix: Prefix) -> Law:
        """[vocab_size]: the processed law behind ``prefix``."""
        tokens = (*self._committed, *prefix)
        if tokens not in self._laws:
            rng = np.random.default_rng([self._seed, len(tokens), *tokens])
            logits: Law = rng.normal(scale=1.2, size=self.vocab_size)
            self._laws[tokens] = compute_law(logits.astype(self._dtype), self._params)
        return self._laws[tokens]

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


@dataclass
class TreeLaws:
    """The target's laws over a tree, for a walk."""

    target: ToyModel

    def law_at(self, node_idx: int, path: Sequence[int]) -> Law:
        return self.target.law(tuple(path))


Draft = Callable[[Chooser, list[DraftProposal]], DraftProposal]
"""(chooser, proposals made before) to one drafter's proposal."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round: draft, merge, walk. The hooks are where wrong variants cut in."""

    target: ToyModel
    drafters: Sequence[Draft]
    max_draft_tokens: int = 64
    change_proposals: Callable[[list[DraftProposal]], list[DraftProposal]] = list
    change_tree: Callable[[TokenTree], TokenTree] = lambda tree: tree
    make_rule: Callable[[Chooser], VerificationRule] = RejectionRule
    wrap_chooser: Callable[[EnumeratingChooser], Any] = lambda chooser: chooser
    distrusted_drafters: frozenset[int] = field(default_factory=frozenset)

    def __call__(self, base: EnumeratingChooser) -> Prefix:
        """Return the committed tokens."""
        chooser = self.wrap_chooser(base)
        proposals: list[DraftProposal] = []
        for draft in self.drafters:
            proposals.append(draft(chooser, proposals))
        merged = merge_proposals(
            self.change_proposals(proposals), max_draft_tokens=self.max_draft_tokens
        )
        tree = self.change_tree(merged)
        result = self.make_rule(chooser).walk(
            tree,
            TreeLaws(self.target),
            WalkOptions(position=0, distrusted_drafters=self.distrusted_drafters),
        )
        assert result.final_token is not None
        return (*(int(tree.token_ids[node]) for node in result.path), result.final_token)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Rounds until the answer is long enough; the draft length follows from earlier rounds."""

    target: ToyModel
    draft_models: Sequence[ToyModel]

    def __call__(self, base: EnumeratingChooser) -> Prefix:
        """Return the committed tokens, cut to the length compared."""
        committed: Prefix = ()
        gamma = 1
        while len(committed) < ANSWER_LENGTH:
            round_ = Round(
                target=self.target.behind(committed),
                drafters=[
                    draft_iid(model.behind(committed), idx, num_branches=1, depth=gamma)
                    for idx, model in enumerate(self.draft_models)
                ],
            )
            tokens = round_(base)
            gamma = 2 if len(tokens) > gamma else 1
            committed = (*committed, *tokens)
        return committed[:ANSWER_LENGTH]


def compute_output_law(procedure: Round | Rounds) -> NDArray[np.float64]:
    """[vocab_size] * ANSWER_LENGTH: the exact law of answers that begin with the procedure."""
    size = procedure.target.vocab_size
    law = np.zeros((size,) * ANSWER_LENGTH)
    total = 0.0
    for probability, tokens in enumerate_outcomes(procedure):
        law[tokens] += probability * compute_continuation(procedure.target, tokens)
        total += probability
    assert abs(total - 1.0) < 1e-5, "the enumerated choices do not sum to 1"
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


def compute_total_variation(procedure: Round | Rounds) -> float:
    """Distance between the output law and the target's, over whole answers."""
    difference = compute_output_law(procedure) - compute_continuation(procedure.target, ())
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
    return float(stats.chisquare(observed[flat > 0], flat[flat > 0]).pvalue)


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
