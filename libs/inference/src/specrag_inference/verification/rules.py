"""What a verification rule is, and the descent all node-by-node rules share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from specrag_common.speculation.token_tree import ROOT, TokenTree

from specrag_inference.sampling.numerics import check_finite
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


class VerificationRule(Protocol):
    """Decides a whole tree so that the output law is the target's."""

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Return what is committed; pure but for the rule's own source of randomness."""
        ...


Decide = Callable[[NDArray[np.floating[Any]], Sequence[Trial], int], Decision]
"""(target_probs at the node, its trials in order, absolute position) to the decision."""


def descend(tree: TokenTree, laws: TargetLaws, options: WalkOptions, decide: Decide) -> WalkResult:
    """Apply ``decide`` from the root down until no child carries the decided token.

    Raises:
        NumericsError: a visited law, the target's or a stated one, has a NaN or an infinity.
    """
    groups = group_by_parent(tree)
    path: list[int] = []
    tokens: list[int] = []
    logprobs: list[float] = []
    violating: list[int] = []
    node_idx = ROOT
    while True:
        target_probs = laws.law_at(node_idx, tokens)
        check_finite(target_probs, "the target's law")
        trials = order_trials(
            tree, groups.get(node_idx, ()), distrusted_drafters=options.distrusted_drafters
        )
        violating += [trial.drafter_index for trial in trials if trial.violates_support]
        decision = decide(target_probs, trials, options.position + len(path))
        logprobs.append(_log(target_probs[decision.token_id]))
        ended = decision.node_idx is not None and decision.token_id in options.stop_token_ids
        if decision.node_idx is not None:
            path.append(decision.node_idx)
            tokens.append(decision.token_id)
            node_idx = decision.node_idx
        if ended or decision.node_idx is None:
            return WalkResult(
                path=tuple(path),
                final_token=None if ended else decision.token_id,
                is_bonus=not ended and not trials,
                logprobs=tuple(logprobs),
                violating_drafters=tuple(violating),
            )


def _log(probability: np.floating[Any]) -> float:
    """Return the natural log; the smallest float's where rounding left an accepted token none."""
    return float(np.log(max(float(probability), float(np.finfo(np.float64).tiny))))
