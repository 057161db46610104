"""REJECTION: several drafters' proposals at a node, tried one after another.

Rule, at a node with the target's processed law ``target_probs`` and trials in a fixed order:
``residual`` starts as ``target_probs``. A trial with token x drawn from ``draft_probs`` is accepted
with probability min(1, residual[x] / draft_probs[x]); on rejection residual becomes
normalise(max(0, residual - draft_probs)). When all are rejected the token is drawn from residual.
A DETERMINISTIC proposal is the case of a one-hot law, temperature 0 that of a one-hot target.

Invariant kept: the output law equals the target's, as long as each SAMPLED token was drawn from
its law independently of the trials before it.

Source: Leviathan et al., arXiv 2211.17192, algorithm 1 (p = target_probs, q = draft_probs); Miao et
al., SpecInfer, arXiv 2305.09781, section 4.3 (several speculative models at a node).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specrag_inference.verification.chooser import Chooser, TrialKey
from specrag_inference.verification.rules import Decision, WalkOptions, WalkResult, descend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.trials import Trial

Law = NDArray[np.floating[Any]]
"""[vocab_size], non-negative, sums to 1."""


class RejectionRule:
    """Rejection sampling with recursive residuals; see the module docstring."""

    __slots__ = ("_chooser",)

    def __init__(self, chooser: Chooser) -> None:
        """Bind to the source of the random choices."""
        self._chooser = chooser

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Walk the tree; see :class:`VerificationRule`."""
        return descend(tree, laws, options, self._decide)

    def _decide(self, target_probs: Law, trials: Sequence[Trial], position: int) -> Decision:
        residual = target_probs
        rejected: list[int] = []
        for ordinal, trial in enumerate(trials):
            key = TrialKey(
                position=position,
                drafter_index=trial.drafter_index,
                branch_idx=trial.branch_idx,
                trial=ordinal,
            )
            if self._chooser.accept(compute_acceptance(residual, trial), key):
                return Decision(token_id=trial.token_id, node_idx=trial.node_idx)
            rejected.append(trial.token_id)
            residual = compute_residual(residual, trial, rejected)
        return Decision(token_id=self._chooser.draw(residual, position=position), node_idx=None)


def compute_acceptance(residual: Law, trial: Trial) -> float:
    """Return min(1, residual[x] / draft_probs[x]) for the trial's token x."""
    if trial.token_id >= len(residual):
        return 0.0
    target_prob = float(residual[trial.token_id])
    if trial.law is None:
        return min(1.0, target_prob)
    idx = int(np.searchsorted(trial.law.token_ids, trial.token_id))
    return min(1.0, target_prob / float(trial.law.probs[idx]))


def compute_residual(residual: Law, trial: Trial, rejected: Sequence[int]) -> Law:
    """Return normalise(max(0, residual - draft_probs)) after the trial was rejected.

    Where rounding leaves nothing, the residual before it, without the ``rejected`` tokens of this
    node (the trial's included); where that leaves nothing either, the residual before it.
    """
    reduced = residual.copy()
    if trial.law is None:
        reduced[[x for x in (trial.token_id,) if x < len(reduced)]] = 0
    else:
        known = trial.law.token_ids < len(reduced)
        token_ids = trial.law.token_ids[known]
        left = reduced[token_ids] - trial.law.probs[known].astype(reduced.dtype)
        reduced[token_ids] = np.maximum(left, 0)
    total = float(reduced.sum(dtype=np.float64))
    if total <= 0.0:
        reduced = residual.copy()
        reduced[[token_id for token_id in rejected if token_id < len(reduced)]] = 0
        total = float(reduced.sum(dtype=np.float64))
    if total <= 0.0:
        return residual
    return reduced / reduced.dtype.type(total)
