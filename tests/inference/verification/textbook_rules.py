"""Block and traversal verification written down from their formulas, with the mistakes to choose.

Dense and slow, without the production rules' arithmetic: a reference for them when no mistake is
chosen, and wrong variants when one is.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from specrag_common.speculation.token_tree import ROOT, TokenTree
from specrag_inference.verification.chooser import Chooser, TrialKey
from specrag_inference.verification.rules import WalkOptions, WalkResult
from specrag_inference.verification.trials import Trial, group_by_parent, order_trials

if TYPE_CHECKING:
    from specrag_inference.verification.laws import TargetLaws

Measure = NDArray[np.float64]


class Mistake(Enum):
    """What can be got wrong."""

    STOP_AT_FIRST_FAILURE = auto()
    """Block: walk forwards, end before the first prefix that is not accepted."""

    RESIDUAL_OF_PLAIN_TARGET = auto()
    """Block: final token from (target - draft)+ instead of (weight * target - draft)+."""

    UNCLIPPED_WEIGHT = auto()
    """Block: weights may rise above 1 on the way and are only clipped when used."""

    PLAIN_RATIO = auto()
    """Traversal: each node starts with weight 1 instead of what the path has accumulated."""

    SIBLINGS_NOT_UPDATED = auto()
    """Traversal: a failed child leaves the measure as it was for its siblings."""

    FAILURE_NOT_CONDITIONED = auto()
    """Traversal: the measure is not divided by the probability of the failure."""

    ONLY_TOKEN_REMOVED = auto()
    """Traversal: of a failed child only its token is taken out of the measure."""

    DUPLICATES_SKIPPED = auto()
    """Traversal: a token that has failed takes no second trial."""


class TextbookTraversal:
    """Leaf-to-root verification over dense measures."""

    def __init__(self, chooser: Chooser, mistake: Mistake | None = None) -> None:
        self._chooser = chooser
        self._mistake = mistake

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        self._tree, self._laws, self._options = tree, laws, options
        self._groups = group_by_parent(tree)
        result = self._settle((), 1.0, None)
        assert result is not None
        return result

    def _settle(
        self, path: tuple[int, ...], weight: float, origin: Trial | None
    ) -> WalkResult | None:
        tokens = [int(self._tree.token_ids[node]) for node in path]
        if tokens and tokens[-1] in self._options.stop_token_ids:
            return make_result(path, None) if self._accepts(origin, path, weight) else None
        start = 1.0 if self._mistake is Mistake.PLAIN_RATIO else weight
        measure = start * normalise(self._laws.law_at(path[-1] if path else ROOT, tokens))
        failed: list[int] = []
        for trial in order_trials(self._tree, self._groups.get(path[-1] if path else ROOT, ())):
            if self._mistake is Mistake.DUPLICATES_SKIPPED and trial.token_id in failed:
                continue
            law = to_dense(trial, len(measure))
            share = min(1.0, measure[trial.token_id] / law[trial.token_id])
            if share > 0.0:
                result = self._settle((*path, trial.node_idx), share, trial)
                if result is not None:
                    return result
            failed.append(trial.token_id)
            measure = self._fail(measure, law, trial.token_id)
        if not self._accepts(origin, path, min(1.0, float(measure.sum()))):
            return None
        return make_result(path, self._chooser.draw(normalise(measure), position=len(path)))

    def _fail(self, measure: Measure, law: Measure, token_id: int) -> Measure:
        if self._mistake is Mistake.SIBLINGS_NOT_UPDATED:
            return measure
        if self._mistake is Mistake.ONLY_TOKEN_REMOVED:
            law = np.where(np.arange(len(law)) == token_id, measure, 0.0)
        left = np.maximum(measure - law, 0.0)
        if self._mistake is Mistake.FAILURE_NOT_CONDITIONED:
            return left
        failure = 1.0 - float(np.minimum(measure, law).sum())
        return left / failure if failure > 1e-13 else measure

    def _accepts(self, origin: Trial | None, path: tuple[int, ...], weight: float) -> bool:
        if origin is None:
            return True
        depth = len(path) - 1
        key = TrialKey.settling(origin, position=self._options.position + depth, depth=depth)
        return self._chooser.accept(weight, key)


class TextbookBlock:
    """Block verification of a chain over dense measures."""

    def __init__(self, chooser: Chooser, mistake: Mistake | None = None) -> None:
        self._chooser = chooser
        self._mistake = mistake

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        groups = group_by_parent(tree)
        chain = [order_trials(tree, groups[node])[0] for node in range(-1, tree.num_nodes - 1)]
        tokens = [trial.token_id for trial in chain]
        targets = [normalise(laws.law_at(idx - 1, tokens[:idx])) for idx in range(len(chain) + 1)]
        drafts = [to_dense(trial, len(targets[0])) for trial in chain]
        accepted = self._count_accepted(chain, targets, drafts)
        if accepted == len(chain):
            law = targets[-1]
        else:
            weight = self._weights(chain, targets, drafts)[accepted]
            if self._mistake is Mistake.RESIDUAL_OF_PLAIN_TARGET:
                weight = 1.0
            law = np.maximum(min(1.0, weight) * targets[accepted] - drafts[accepted], 0.0)
            law = normalise(law if law.sum() > 0.0 else targets[accepted])
        path = tuple(trial.node_idx for trial in chain[:accepted])
        return make_result(path, self._chooser.draw(law, position=accepted))

    def _weights(
        self, chain: list[Trial], targets: list[Measure], drafts: list[Measure]
    ) -> list[float]:
        weights = [1.0]
        for trial, target, draft in zip(chain, targets, drafts, strict=False):
            weight = weights[-1] * target[trial.token_id] / draft[trial.token_id]
            is_clipped = self._mistake is not Mistake.UNCLIPPED_WEIGHT
            weights.append(min(1.0, weight) if is_clipped else weight)
        return weights

    def _count_accepted(
        self, chain: list[Trial], targets: list[Measure], drafts: list[Measure]
    ) -> int:
        weights = [min(1.0, weight) for weight in self._weights(chain, targets, drafts)]
        chances = []
        for weight, target, draft in zip(weights, targets, drafts, strict=False):
            left = float(np.maximum(weight * target - draft, 0.0).sum())
            chances.append(left / (left + 1.0 - weight) if left > 1e-13 else 0.0)
        chances = [*chances[1:], weights[-1]]
        if self._mistake is Mistake.STOP_AT_FIRST_FAILURE:
            for idx, chance in enumerate(chances):
                if not self._accepts(chain[idx], idx, chance):
                    return idx
            return len(chain)
        for idx in reversed(range(len(chain))):
            if self._accepts(chain[idx], idx, chances[idx]):
                return idx + 1
        return 0

    def _accepts(self, trial: Trial, depth: int, chance: float) -> bool:
        return self._chooser.accept(chance, TrialKey.settling(trial, position=depth, depth=depth))


def to_dense(trial: Trial, vocab_size: int) -> Measure:
    """[vocab_size]: the law a token was drawn from."""
    law = np.zeros(vocab_size)
    law[trial.law.token_ids] = trial.law.probs
    return law


def normalise(law: NDArray[np.floating[Any]]) -> Measure:
    """The law in float64, summing to 1."""
    wide = law.astype(np.float64)
    normalised: Measure = wide / wide.sum()
    return normalised


def make_result(path: tuple[int, ...], final_token: int | None) -> WalkResult:
    """A result with nothing but tokens."""
    return WalkResult(path=path, final_token=final_token, is_bonus=False, logprobs=())
