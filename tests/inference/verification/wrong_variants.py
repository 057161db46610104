"""Plausible mistakes, each biased: what the exactness test must catch.

Every variant is a round in which one thing is done wrong; most were seen in real systems.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from specrag_common.speculation.proposals import DraftLaw, DraftProposal, SiblingKind
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import SamplingParams
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.traversal import TraversalRule

from tests.inference.verification.exact_cells import cut_unlikely, sample_iid
from tests.inference.verification.textbook_rules import Mistake, TextbookBlock, TextbookTraversal
from tests.inference.verification.toy_worlds import (
    Draft,
    Round,
    Rounds,
    ToyModel,
    choose_by_looking,
    choose_greedy,
    draft_deterministic,
    draft_ending_early,
    draft_iid,
    draft_without_replacement,
    use,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from numpy.typing import NDArray
    from specrag_inference.verification.chooser import Chooser, TrialKey
    from specrag_inference.verification.enumeration import EnumeratingChooser
    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.rules import (
        VerificationRule,
        WalkOptions,
        WalkResult,
    )
    from specrag_inference.verification.trials import Trial

_PARAMS = SamplingParams(temperature=0.6)


def _models(vocab_size: int = 3, *, max_support: int | None = None) -> list[ToyModel]:
    """A target and three drafters in float64."""
    return [
        ToyModel(
            seed=seed,
            vocab_size=vocab_size,
            params=_PARAMS,
            max_support=max_support if seed else None,
        )
        for seed in range(4)
    ]


def _round(
    drafters: Callable[[tuple[ToyModel, ...]], Sequence[Draft]], vocab_size: int = 3, **wrong: Any
) -> Round:
    target, *others = _models(vocab_size)
    return Round(target=target, drafters=drafters(tuple(others)), **wrong)


def merge_duplicates_away() -> Round:
    """Three drafters with one model, but a node keeps only its first proposal."""

    def change(tree: TokenTree) -> TokenTree:
        first = {proposal.node_idx: proposal for proposal in reversed(tree.proposals)}
        return replace(tree, proposals=tuple(first.values()))

    return _round(
        lambda models: [draft_iid(models[0], idx, num_branches=1) for idx in range(3)],
        change_tree=change,
    )


def give_greedy_tokens_model_laws() -> Round:
    """A greedy chain that states the model's probabilities as if it had been drawn from them."""
    target, model, *_ = _models()

    def change(proposals: list[DraftProposal]) -> list[DraftProposal]:
        (branch,) = proposals[0].branches
        laws = (model.draft_law(()), model.draft_law(branch.token_ids[:1]))
        return [replace(proposals[0], branches=(replace(branch, laws=laws),))]

    return Round(
        target=target,
        drafters=[draft_deterministic(choose_greedy(model), 0)],
        change_proposals=change,
    )


def read_siblings_as_independent() -> Round:
    """Siblings drawn without replacement, declared IID."""
    return _without_replacement(lambda proposal: replace(proposal, sibling_kind=SiblingKind.IID))


def reorder_siblings_by_probability() -> Round:
    """Siblings drawn without replacement, tried most likely first."""

    def change(proposal: DraftProposal) -> DraftProposal:
        def likelihood(idx: int) -> float:
            branch = proposal.branches[idx]
            law = branch.laws[0]
            assert law is not None
            return float(law.probs[list(law.token_ids).index(branch.token_ids[0])])

        order = sorted(range(len(proposal.branches)), key=likelihood, reverse=True)
        return replace(proposal, branches=tuple(proposal.branches[idx] for idx in order))

    return _without_replacement(change)


def drop_first_sibling() -> Round:
    """Siblings drawn without replacement, the first one left out."""
    return _without_replacement(lambda proposal: replace(proposal, branches=proposal.branches[1:]))


def cut_by_confidence_after_drawing() -> Round:
    """Branches cut before an unlikely token, still declared SAMPLED."""
    return _round(sample_iid(1), change_proposals=cut_unlikely)


def count_budget_on_merged_nodes() -> Round:
    """Later branches are kept while the merged tree has room: what merges comes free."""

    def change(tree: TokenTree) -> TokenTree:
        kept = tuple(proposal for proposal in tree.proposals if proposal.node_idx < 2)
        return TokenTree(
            token_ids=tree.token_ids[:2], parent_idx=tree.parent_idx[:2], proposals=kept
        )

    return _round(
        lambda models: [draft_iid(models[0], 0, num_branches=3, depth=1)],
        vocab_size=5,
        change_tree=change,
    )


def count_budget_on_realised_lengths() -> Round:
    """A later drafter's branch that ended early frees budget for an earlier drafter's sibling."""
    return _round(
        lambda models: [
            draft_ending_early(models[0], 0, num_branches=2, state_gamma=False),
            draft_ending_early(models[1], 1, num_branches=1, state_gamma=False),
        ],
        max_draft_tokens=4,
    )


def use_accept_uniform_for_final() -> Round:
    """The uniform that rejected the trial also draws the final token."""
    return _round(sample_iid(1), wrap_chooser=lambda base: _SharedUniform(base, _slot_by_position))


def use_draft_uniform_to_accept() -> Round:
    """The uniform that drew the draft token also tries it."""
    return _round(
        lambda models: [draft_iid(models[0], 0, num_branches=1, depth=1)],
        wrap_chooser=lambda base: _SharedUniform(base, _slot_but_final),
    )


def try_deterministic_before_sampled() -> Round:
    """Trials ordered by drafter alone; the first drafter copies what the second one drew."""
    return _round(
        lambda models: [
            draft_iid(models[0], 1, num_branches=1),
            draft_deterministic(choose_by_looking, 0),
        ],
        make_rule=use(_DrafterOrderRule),
    )


def draw_final_from_next_row() -> Round:
    """After a rejection the token comes from the row behind the rejected token."""
    return _round(sample_iid(1), make_rule=use(_NextRowRule))


def state_uncapped_laws() -> Round:
    """Tokens drawn from capped laws, while the uncapped ones are stated."""
    target, capped, *_ = _models(4, max_support=2)
    _, uncapped, *_ = _models(4)

    def change(proposals: list[DraftProposal]) -> list[DraftProposal]:
        (branch,) = proposals[0].branches
        laws: list[DraftLaw | None] = [
            uncapped.draft_law(branch.token_ids[:idx]) for idx in range(len(branch.token_ids))
        ]
        return [replace(proposals[0], branches=(replace(branch, laws=tuple(laws)),))]

    return Round(
        target=target,
        drafters=[draft_iid(capped, 0, num_branches=1)],
        change_proposals=change,
    )


def mistake_in_block(mistake: Mistake) -> Round:
    """A chain, verified as a block with one mistake."""
    return _round(
        lambda models: [draft_iid(models[0], 0, num_branches=1)],
        vocab_size=5,
        make_rule=use(lambda chooser: TextbookBlock(chooser, mistake)),
    )


def mistake_in_traversal(mistake: Mistake) -> Round:
    """Two independent branches, traversed with one mistake."""
    return _round(sample_iid(2), make_rule=use(lambda chooser: TextbookTraversal(chooser, mistake)))


def verify_merged_chain_as_block() -> Round:
    """Two branches that merged into a chain are taken for one."""

    def make_rule(tree: TokenTree, chooser: Chooser, options: WalkOptions) -> VerificationRule:
        is_chain = np.array_equal(tree.parent_idx, np.arange(-1, tree.num_nodes - 1))
        return TextbookBlock(chooser) if is_chain else TraversalRule(chooser)

    return _round(sample_iid(2), make_rule=make_rule)


def choose_rule_from_merged_shape() -> Round:
    """Either rule is exact, but which one is taken depends on whether two branches agree."""

    def make_rule(tree: TokenTree, chooser: Chooser, options: WalkOptions) -> VerificationRule:
        is_chain = np.array_equal(tree.parent_idx, np.arange(-1, tree.num_nodes - 1))
        return RejectionRule(chooser) if is_chain else TraversalRule(chooser)

    return _round(sample_iid(2), make_rule=make_rule)


def share_uniforms_between_rounds(purpose: str) -> Rounds:
    """A block looks behind the token it ends with; the next round meets the same uniforms."""
    target, model = (
        ToyModel(seed=seed, vocab_size=3, params=SamplingParams(temperature=1.0))
        for seed in (1, 11)
    )
    return Rounds(
        target=target,
        draft_models=[model],
        first_gamma=3,
        make_uniforms=partial(_SharedByRounds, purpose=purpose),
    )


WRONG_VARIANTS: dict[str, Callable[[], Round | Rounds]] = {
    "duplicates merged away": merge_duplicates_away,
    "deterministic with model probabilities": give_greedy_tokens_model_laws,
    "without replacement read as independent": read_siblings_as_independent,
    "without replacement reordered by probability": reorder_siblings_by_probability,
    "without replacement, first one dropped": drop_first_sibling,
    "confidence cut after drawing": cut_by_confidence_after_drawing,
    "budget on merged nodes": count_budget_on_merged_nodes,
    "budget on realised lengths": count_budget_on_realised_lengths,
    "uniform used twice: accept and final": use_accept_uniform_for_final,
    "uniform used twice: draft and accept": use_draft_uniform_to_accept,
    "deterministic tried before sampled": try_deterministic_before_sampled,
    "final token from the next row": draw_final_from_next_row,
    "stated law is not the law drawn from": state_uncapped_laws,
    "block: stopped at the first failure": partial(mistake_in_block, Mistake.STOP_AT_FIRST_FAILURE),
    "block: residual of the plain target": partial(
        mistake_in_block, Mistake.RESIDUAL_OF_PLAIN_TARGET
    ),
    "block: weights not clipped on the way": partial(mistake_in_block, Mistake.UNCLIPPED_WEIGHT),
    "block: two branches merged into a chain": verify_merged_chain_as_block,
    "traversal: plain target ratio": partial(mistake_in_traversal, Mistake.PLAIN_RATIO),
    "traversal: siblings not updated": partial(mistake_in_traversal, Mistake.SIBLINGS_NOT_UPDATED),
    "traversal: failure not conditioned on": partial(
        mistake_in_traversal, Mistake.FAILURE_NOT_CONDITIONED
    ),
    "traversal: only the token removed": partial(mistake_in_traversal, Mistake.ONLY_TOKEN_REMOVED),
    "traversal: duplicates skipped": partial(mistake_in_traversal, Mistake.DUPLICATES_SKIPPED),
    "rule chosen from the merged shape": choose_rule_from_merged_shape,
    "draft uniforms met again next round": partial(share_uniforms_between_rounds, "draft"),
    "accept uniforms met again next round": partial(share_uniforms_between_rounds, "accept"),
}


def _without_replacement(change: Callable[[DraftProposal], DraftProposal]) -> Round:
    return _round(
        lambda models: [draft_without_replacement(models[0], 0, num_roots=2, num_children=1)],
        change_proposals=lambda proposals: [change(proposal) for proposal in proposals],
    )


class _DrafterOrderRule(RejectionRule):
    """Ignores that SAMPLED proposals come first."""

    def _decide(
        self, target_probs: NDArray[np.floating[Any]], trials: Sequence[Trial], position: int
    ) -> Any:
        in_drafter_order = sorted(trials, key=lambda trial: trial.drafter_index)
        return super()._decide(target_probs, in_drafter_order, position)


class _NextRowRule:
    """Replaces the final token of a rejection by one from the rejected node's row."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        result = RejectionRule(self._chooser).walk(tree, laws, options)
        if result.is_bonus:
            return result
        tokens = [int(tree.token_ids[node]) for node in result.path]
        children = tree.compute_children()[result.path[-1] if result.path else -1]
        wrong_row = laws.law_at(children[0], [*tokens, int(tree.token_ids[children[0]])])
        final_token = self._chooser.draw(wrong_row, position=len(tokens))
        return replace(result, final_token=final_token)


def _slot_by_position(purpose: str, position: int) -> tuple[str, int]:
    return ("draft" if purpose == "draft" else "shared", position)


def _slot_but_final(purpose: str, position: int) -> tuple[str, int]:
    return ("final" if purpose == "final" else "shared", position)


class _Slots:
    """Uniforms that serve more than one choice: tracks where each one lies."""

    def __init__(self, base: EnumeratingChooser) -> None:
        self._base = base
        self._interval: dict[Hashable, tuple[float, float]] = {}

    def accept(self, slot: Hashable, probability: float) -> bool:
        return self._split(slot, [0.0, probability, 1.0]) == 0

    def draw(self, slot: Hashable, law: NDArray[np.floating[Any]]) -> int:
        edges = np.concatenate([[0.0], np.cumsum(law / law.sum())])
        edges[-1] = 1.0
        return self._split(slot, edges.tolist())

    def _split(self, slot: Hashable, edges: list[float]) -> int:
        """Cut the uniform's interval at ``edges`` and take one part."""
        low, high = self._interval.get(slot, (0.0, 1.0))
        parts = [(max(low, start), min(high, end)) for start, end in pairwise(edges)]
        weights = [max(0.0, end - start) / (high - low) for start, end in parts]
        option = self._base.choose(weights)
        self._interval[slot] = parts[option]
        return option


class _SharedUniform:
    """A chooser whose uniforms are shared between purposes."""

    def __init__(
        self, base: EnumeratingChooser, slot_of: Callable[[str, int], tuple[str, int]]
    ) -> None:
        self._slots = _Slots(base)
        self._slot_of = slot_of
        self._drafting = True

    def accept(self, probability: float, key: TrialKey) -> bool:
        self._drafting = False
        return self._slots.accept(self._slot_of("accept", key.position), probability)

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:
        purpose = "draft" if self._drafting else "final"
        return self._slots.draw(self._slot_of(purpose, position), law)


class _SharedByRounds:
    """Uniforms named by absolute position alone: a later round meets those of an earlier one."""

    def __init__(self, base: EnumeratingChooser, *, purpose: str) -> None:
        self._base = base
        self._slots = _Slots(base)
        self._purpose = purpose

    def drafting(self, start: int) -> Chooser:
        return _Positioned(self._slots, start) if self._purpose == "draft" else self._base

    def deciding(self, start: int) -> Chooser:
        return _Positioned(self._slots, start) if self._purpose == "accept" else self._base


@dataclass(frozen=True)
class _Positioned:
    """The choices of a round that begins behind ``start`` tokens, by absolute position."""

    slots: _Slots
    start: int

    def accept(self, probability: float, key: TrialKey) -> bool:
        return self.slots.accept(("accept", self.start + key.position), probability)

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:
        return self.slots.draw(("draw", self.start + position), law)
