"""Traversal verification: a tree is settled from its leaves upwards.

Rule: a node is reached with a weight, 1 at the root and min(1, measure[x] / draft_probs[x]) for a
child with token x, where ``measure`` = weight * target_probs at its parent. The trials at a node
come in a fixed order, and each one's whole subtree is settled before the next: when nothing at or
below the child is accepted, measure becomes max(0, measure - draft_probs) divided by the
probability of that failure. A node whose children have all failed is accepted with the weight its
measure has left; the final token is then drawn from the measure normalised, which at a leaf is the
target's own law.

Invariant kept: a subtree is accepted with exactly the weight it was reached with, whatever is
proposed in it, and when it is, what follows has the target's law. So a failure says nothing
about the trials behind it, and the output law equals the target's as long as each SAMPLED token was
drawn from its law independently of the trials before it. That holds for siblings of either kind,
for proposals that merged into one node, and for several drafters.

At least as much is accepted as by trying node by node: there a rejected token ends the walk, here a
likely continuation can still make up for an unlikely token. The price: the target's law is needed
at every node that is tried, and not only along the accepted path.

Source: Weng et al., arXiv 2505.12398, algorithm 1 (p_ini = weight, M_b = target_probs, M_s =
draft_probs), extended to several proposals for one node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.verification.residual import Residual
from specrag_inference.verification.rules import Step, TreeVisits, compute_logprob
from specrag_inference.verification.settling import Settling

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.chooser import Chooser
    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.rules import WalkOptions, WalkResult
    from specrag_inference.verification.trials import Trial


class TraversalRule:
    """Leaf-to-root verification of a whole tree; see the module docstring."""

    __slots__ = ("_chooser",)

    def __init__(self, chooser: Chooser) -> None:
        """Bind to the source of the random choices."""
        self._chooser = chooser

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Walk the tree; see :class:`VerificationRule`."""
        settling = Settling(self._chooser, TreeVisits(tree, laws, options))
        result = _settle(settling, (), 1.0, None)
        assert result is not None, "the root is accepted whatever fails"
        return result


def _settle(
    settling: Settling, steps: tuple[Step, ...], weight: float, origin: Trial | None
) -> WalkResult | None:
    """Settle a node reached with ``weight``, and all below it.

    Returns:
        The walk's result, or ``None`` when nothing at or below the node is accepted.
    """
    visits = settling.visits
    trials = () if visits.is_stopped(steps) else visits.list_trials(steps)
    if not trials:
        return settling.settle_leaf(steps, weight, origin)
    target_probs = visits.compute_law(steps)
    residual = Residual(target_probs, weight)
    for trial in trials:
        child_weight = residual.compute_acceptance(trial)
        if child_weight > 0.0:
            logprob = compute_logprob(target_probs, trial.token_id)
            child = Step(trial.node_idx, trial.token_id, logprob)
            result = _settle(settling, (*steps, child), child_weight, trial)
            if result is not None:
                return result
        residual.reject(trial)
    return settling.settle_inner(steps, target_probs, residual, origin)
