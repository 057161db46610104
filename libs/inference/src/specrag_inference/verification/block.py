"""Block verification: one sampled chain is accepted up to its longest acceptable prefix.

Rule: the weight of a prefix is w_0 = 1, w_i = min(1, w_{i-1} * target(x_i) / draft(x_i)). From the
whole chain backwards, prefix i is accepted with probability h_i: h of the whole chain is its
weight, h_i = d_i / (d_i + 1 - w_i) for a shorter one, where d_i is the mass of max(0, w_i * target
- draft) behind it. The longest accepted prefix counts: a failure at i says nothing about shorter
ones. Behind it comes a token of max(0, w_i * target - draft) normalised; behind the whole chain one
of the target's law, and behind an end-of-sequence token, which ends the chain, none.

Invariant kept: prefix i is accepted, at least, with exactly w_i whatever follows it, and the output
law equals the target's. It holds for chains that ended early by their own earlier tokens, and a
DETERMINISTIC token inside the chain is the case of a one-hot law. No rule accepts more of one
chain on average.

It decides what :class:`~specrag_inference.verification.traversal.TraversalRule` decides on a
chain, without the recursion.

Source: Sun et al., arXiv 2403.10444, algorithm 2 (p_i = w_i, M_b = target, M_s = draft).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from specrag_inference.verification.residual import Law, Residual
from specrag_inference.verification.rules import Step, TreeVisits, compute_logprob
from specrag_inference.verification.settling import Settling

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.chooser import Chooser
    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.rules import WalkOptions, WalkResult
    from specrag_inference.verification.trials import Trial


class _Link(NamedTuple):
    """One token of the chain with what precedes it: the target's law, and the measure of it."""

    trial: Trial
    target_probs: Law
    residual: Residual
    step: Step


class BlockRule:
    """Block verification of a single chain; see the module docstring."""

    __slots__ = ("_chooser",)

    def __init__(self, chooser: Chooser) -> None:
        """Bind to the source of the random choices."""
        self._chooser = chooser

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Walk the chain; see :class:`VerificationRule`.

        Raises:
            ValueError: a node has more than one proposal behind it.
        """
        settling = Settling(self._chooser, TreeVisits(tree, laws, options))
        links, weight = _weigh(settling.visits)
        steps = [link.step for link in links]
        result = settling.settle_leaf(steps, weight, links[-1].trial if links else None)
        while result is None:
            trial, target_probs, residual, _ = links.pop()
            steps.pop()
            residual.reject(trial)
            origin = links[-1].trial if links else None
            result = settling.settle_inner(steps, target_probs, residual, origin)
        return result


def _weigh(visits: TreeVisits) -> tuple[list[_Link], float]:
    """Return the chain as far as its prefixes have any weight, and the weight of all of it."""
    links: list[_Link] = []
    steps: list[Step] = []
    weight = 1.0
    while weight > 0.0 and not visits.is_stopped(steps):
        trials = visits.list_trials(steps)
        if not trials:
            break
        (trial,) = trials
        target_probs = visits.compute_law(steps)
        residual = Residual(target_probs, weight)
        weight = residual.compute_acceptance(trial)
        logprob = compute_logprob(target_probs, trial.token_id) if weight > 0.0 else 0.0
        steps.append(Step(trial.node_idx, trial.token_id, logprob))
        links.append(_Link(trial, target_probs, residual, steps[-1]))
    return links, weight
