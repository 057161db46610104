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

from typing import TYPE_CHECKING

from specrag_inference.verification.chooser import Chooser, TrialKey
from specrag_inference.verification.residual import Law, Residual
from specrag_inference.verification.rules import Decision, WalkOptions, WalkResult, descend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.trials import Trial


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
        residual = Residual(target_probs)
        for ordinal, trial in enumerate(trials):
            key = TrialKey(
                position=position,
                drafter_index=trial.drafter_index,
                branch_idx=trial.branch_idx,
                trial=ordinal,
            )
            if self._chooser.accept(residual.compute_acceptance(trial), key):
                return Decision(token_id=trial.token_id, node_idx=trial.node_idx)
            residual.reject(trial)
        return Decision(
            token_id=self._chooser.draw(residual.get_law(), position=position), node_idx=None
        )
