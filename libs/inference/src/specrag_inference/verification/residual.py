"""What a node still has to give out after some of its proposals were rejected.

The state of a node is a measure over tokens, ``weight * law``: with probability ``weight`` the walk
must end at or below the node, and then the next token must follow ``law``. It starts as the
target's processed law with the weight under which the node was reached, 1 at the root. A proposal
with token x drawn from ``draft_probs`` takes its share min(measure, draft_probs) out of the measure
when it is accepted; given its rejection the measure is max(0, measure - draft_probs) divided by
the probability of that rejection. A DETERMINISTIC proposal is the case of a one-hot law.

Node-by-node rules keep the weight at 1; there this is the usual residual normalise(max(0, target -
draft)). All arithmetic runs in float64, whatever the laws' dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specrag_inference.sampling.numerics import NumericsError

if TYPE_CHECKING:
    from specrag_common.speculation.proposals import TokenIds

    from specrag_inference.verification.trials import Trial

Law = NDArray[np.floating[Any]]
"""[vocab_size], non-negative, sums to 1."""

_ROUNDING = 1e-13
"""A measure below this is rounding: such a rest is reached about as seldom as it is large."""


class Residual:
    """The measure of one node, updated by each rejected trial; see the module docstring.

    Attributes:
        weight: mass of the measure, 0 to 1.
    """

    __slots__ = ("_mass", "_rejected", "_scale", "_target_probs", "weight")

    def __init__(self, target_probs: Law, weight: float = 1.0) -> None:
        """Start from the target's law, which is not mutated.

        Raises:
            NumericsError: the law has no mass.
        """
        total = float(target_probs.sum(dtype=np.float64))
        if not total > 0.0:
            raise NumericsError(f"the target's law of {len(target_probs)} entries sums to {total}")
        self.weight = weight
        self._target_probs = target_probs
        self._mass: NDArray[np.float64] | None = None
        self._scale = weight / total
        self._rejected: list[int] = []

    def compute_acceptance(self, trial: Trial) -> float:
        """Return min(1, measure[x] / draft_probs[x]) for the trial's token x."""
        if trial.token_id >= len(self._target_probs):
            return 0.0
        mass = self._target_probs if self._mass is None else self._mass
        return min(
            1.0, self._scale * float(mass[trial.token_id]) / trial.law.get_prob(trial.token_id)
        )

    def reject(self, trial: Trial) -> None:
        """Take the trial's proposal out of the measure.

        Where rounding leaves nothing of a measure that must not fail, the one before it is kept
        without the tokens rejected at this node; where that leaves nothing either, as it was.
        """
        self._rejected.append(trial.token_id)
        mass = self._target_probs if self._mass is None else self._mass
        num_known = int(np.searchsorted(trial.law.token_ids, len(mass)))
        token_ids = trial.law.token_ids[:num_known]
        draft_probs = trial.law.probs[:num_known]
        measure = self._scale * mass[token_ids].astype(np.float64)
        taken = float(np.minimum(measure, draft_probs).sum())
        if taken > 0.0:
            self._take(taken, token_ids, draft_probs)

    def get_law(self) -> Law:
        """Return the law of the next token: the measure normalised.

        A measure that rounding has emptied unnoticed is replaced by the target's law without the
        rejected tokens.
        """
        if self._mass is None:
            return self._target_probs
        if not self._mass.any():
            self._mass[:] = self._target_probs
            self._drop_rejected(self._mass)
        law: Law = self._mass / self._mass.sum()
        return law

    def _take(self, taken: float, token_ids: TokenIds, draft_probs: NDArray[np.float64]) -> None:
        if self._mass is None:
            self._mass = self._target_probs.astype(np.float64)
        left = self.weight - taken
        if left > _ROUNDING:
            rest = self._mass[token_ids] - draft_probs / self._scale
            self._mass[token_ids] = np.maximum(rest, 0.0)
            rejection = 1.0 - self.weight + left
            self.weight = left / rejection
            self._scale /= rejection
        elif self.weight < 1.0:
            self.weight = self._scale = 0.0
        else:
            self._drop_rejected(self._mass)

    def _drop_rejected(self, mass: NDArray[np.float64]) -> None:
        rejected = [token_id for token_id in self._rejected if token_id < len(mass)]
        kept = mass[rejected]
        mass[rejected] = 0.0
        total = float(mass.sum())
        if total > 0.0:
            self._scale = self.weight / total
        else:
            mass[rejected] = kept
