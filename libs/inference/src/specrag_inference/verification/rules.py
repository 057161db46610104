"""What a verification rule is, what all rules share, and the descent of node-by-node rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from specrag_common.speculation.token_tree import ROOT, TokenTree

from specrag_inference.sampling.numerics import check_finite
from specrag_inference.verification.residual import Law
from specrag_inference.verification.trials import Trial, group_by_parent, order_trials

if TYPE_CHECKING:
    from specrag_inference.verification.laws import TargetLaws


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkResult:
    """What one verification commits.

    Attributes:
        path: accepted node indices, from the first level down.
        final_token: the token behind them (residual or bonus); ``None`` when the accepted path
            ended in a stop token, behind which there is nothing.
        is_bonus: the final token was drawn where nothing was proposed: at a leaf, or in an empty
            tree.
        logprobs: natural log of the target's law at each accepted token, then at the final one.
        violating_drafters: the drafter of each tried proposal whose stated law was not believed;
            from here on its proposals are to be taken as DETERMINISTIC.
    """

    path: tuple[int, ...]
    final_token: int | None
    is_bonus: bool
    logprobs: tuple[float, ...]
    violating_drafters: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The token decided at one node, and the child that carries it, if one does."""

    token_id: int
    node_idx: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WalkOptions:
    """What a walk needs beside the tree and the laws.

    Attributes:
        position: absolute answer position of the first level: the number of committed tokens.
        stop_token_ids: an accepted one ends the walk without a final token.
        distrusted_drafters: drafters whose laws are not believed any more.
    """

    position: int
    stop_token_ids: Collection[int] = ()
    distrusted_drafters: Collection[int] = ()


class Step(NamedTuple):
    """One accepted node, or one that is assumed accepted for now."""

    node_idx: int
    token_id: int
    logprob: float


class FinalToken(NamedTuple):
    """The token behind the accepted nodes."""

    token_id: int
    logprob: float


class VerificationRule(Protocol):
    """Decides a whole tree so that the output law is the target's."""

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Return what is committed; pure but for the rule's own source of randomness."""
        ...


class TreeVisits:
    """The tree as a walk sees it: laws and trials at the nodes it visits."""

    __slots__ = ("_groups", "_laws", "_tree", "_violating", "options")

    def __init__(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> None:
        """Begin a walk: nothing is visited."""
        self.options = options
        self._tree = tree
        self._laws = laws
        self._groups = group_by_parent(tree)
        self._violating: list[int] = []

    def compute_law(self, steps: Sequence[Step]) -> Law:
        """Return the target's law behind ``steps``.

        Raises:
            NumericsError: it has a NaN or an infinity.
        """
        node_idx = steps[-1].node_idx if steps else ROOT
        target_probs = self._laws.law_at(node_idx, [step.token_id for step in steps])
        check_finite(target_probs, "the target's law")
        return target_probs

    def list_trials(self, steps: Sequence[Step]) -> list[Trial]:
        """Return the trials behind ``steps`` in order, and note laws that are not believed.

        Raises:
            NumericsError: a stated law has a NaN or an infinity.
        """
        proposals = self._groups.get(steps[-1].node_idx if steps else ROOT, ())
        trials = order_trials(
            self._tree, proposals, distrusted_drafters=self.options.distrusted_drafters
        )
        self._violating += [trial.drafter_index for trial in trials if trial.violates_support]
        return trials

    def is_stopped(self, steps: Sequence[Step]) -> bool:
        """Return whether the last step's token ends the answer."""
        return bool(steps) and steps[-1].token_id in self.options.stop_token_ids

    def finish(
        self, steps: Sequence[Step], final: FinalToken | None, *, is_bonus: bool = False
    ) -> WalkResult:
        """Return the result of the whole walk: the accepted steps and the token behind them."""
        logprobs = [step.logprob for step in steps]
        return WalkResult(
            path=tuple(step.node_idx for step in steps),
            final_token=None if final is None else final.token_id,
            is_bonus=is_bonus,
            logprobs=tuple(logprobs if final is None else [*logprobs, final.logprob]),
            violating_drafters=tuple(self._violating),
        )


Decide = Callable[[Law, Sequence[Trial], int], Decision]
"""(target_probs at the node, its trials in order, absolute position) to the decision."""


def descend(tree: TokenTree, laws: TargetLaws, options: WalkOptions, decide: Decide) -> WalkResult:
    """Apply ``decide`` from the root down until no child carries the decided token.

    Raises:
        NumericsError: a visited law, the target's or a stated one, has a NaN or an infinity.
    """
    visits = TreeVisits(tree, laws, options)
    steps: list[Step] = []
    while not visits.is_stopped(steps):
        target_probs = visits.compute_law(steps)
        trials = visits.list_trials(steps)
        decision = decide(target_probs, trials, options.position + len(steps))
        logprob = compute_logprob(target_probs, decision.token_id)
        if decision.node_idx is None:
            final = FinalToken(token_id=decision.token_id, logprob=logprob)
            return visits.finish(steps, final, is_bonus=not trials)
        step = Step(node_idx=decision.node_idx, token_id=decision.token_id, logprob=logprob)
        steps.append(step)
    return visits.finish(steps, None)


def compute_logprob(target_probs: Law, token_id: int) -> float:
    """Return the natural log of the token's probability, as a float64.

    A token that the walk commits has a positive probability; where rounding left none, the smallest
    float's logarithm stands for it.
    """
    return float(np.log(max(float(target_probs[token_id]), float(np.finfo(np.float64).tiny))))
