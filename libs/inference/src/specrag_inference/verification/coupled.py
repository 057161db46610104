"""COUPLED: drafter-invariant verification by Gumbel coupling.

Rule: the token at answer position t is y = argmax over x of log target_probs[x] + G(seed, t, x).
Descend when a child carries y; otherwise y is the final token. Drafters pick the argmax of
log draft_probs + the same G, which makes them agree often.

Invariant kept: the law over seeds is the target's, and for one seed the tokens depend on nothing
but the target's laws: not on drafts, tree shape or lateness.

Source: Daliri et al., arXiv 2408.07978.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.verification.rules import Decision, WalkOptions, WalkResult, descend

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.randomness import RandomStream
    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.laws import TargetLaws
    from specrag_inference.verification.residual import Law
    from specrag_inference.verification.trials import Trial


class CoupledRule:
    """The shared-Gumbel rule; see the module docstring."""

    __slots__ = ("_random",)

    def __init__(self, random: RandomStream) -> None:
        """Bind to the sequence's stream."""
        self._random = random

    def walk(self, tree: TokenTree, laws: TargetLaws, options: WalkOptions) -> WalkResult:
        """Walk the tree; see :class:`VerificationRule`."""
        return descend(tree, laws, options, self._decide)

    def _decide(self, target_probs: Law, trials: Sequence[Trial], position: int) -> Decision:
        token_id = choose_coupled(target_probs, self._random, position=position)
        node_idx = next((trial.node_idx for trial in trials if trial.token_id == token_id), None)
        return Decision(token_id=token_id, node_idx=node_idx)


def choose_coupled(law: Law, random: RandomStream, *, position: int) -> int:
    """Return argmax of log law + G at ``position``; the lowest id on ties.

    Raises:
        NumericsError: the law has no positive entry.
    """
    support = np.flatnonzero(law > 0)
    if not len(support):
        raise NumericsError(f"a law of {len(law)} entries has no mass: nothing can be chosen")
    if len(support) == 1:
        return int(support[0])
    return int(support[random.gumbel_argmax(position, support, law[support])])
