"""The random choices of a walk, as a seam.

Production plugs in numbers addressed by key; the exactness test plugs in an enumerator that takes
every branch with its probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specrag_common.speculation.randomness import Purpose, RandomStream

from specrag_inference.sampling.drawing import draw

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from specrag_inference.verification.trials import Trial


_SETTLING_TRIALS = 2**16
"""Where the ``trial`` numbers of rules that settle upwards begin: above any ordinal at a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialKey:
    """Which proposal is on trial; names its uniform.

    Attributes:
        position: absolute answer position of the token.
        drafter_index: the drafter.
        branch_idx: draw order of the branch.
        trial: ordinal of the trial at the node, from 0; see :meth:`settling`.
    """

    position: int
    drafter_index: int
    branch_idx: int
    trial: int

    @staticmethod
    def settling(trial: Trial, *, position: int, depth: int) -> TrialKey:
        """Return the key of the decision whether a proposal's node is where the walk ends.

        Rules that settle a tree upwards decide about positions behind the token they end with, and
        the next round decides about the same positions again. So the key also holds ``depth``, the
        number of tokens before this one in its round: with the position it tells rounds apart.
        """
        return TrialKey(
            position=position,
            drafter_index=trial.drafter_index,
            branch_idx=trial.branch_idx,
            trial=_SETTLING_TRIALS + depth,
        )


class Chooser(Protocol):
    """Makes the random choices of a walk, each independent of all others."""

    def accept(self, probability: float, key: TrialKey) -> bool:
        """Return true with ``probability`` (0 to 1)."""
        ...

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:
        """Return an index drawn from ``law``: the token that ends the round at ``position``."""
        ...


class CounterChooser:
    """Choices from the counter stream, with purposes ACCEPT and FINAL."""

    __slots__ = ("_random",)

    def __init__(self, random: RandomStream) -> None:
        """Bind to the sequence's stream."""
        self._random = random

    def accept(self, probability: float, key: TrialKey) -> bool:
        """Compare the key's uniform with ``probability``; see :class:`Chooser`."""
        if probability >= 1.0 or probability <= 0.0:
            return probability >= 1.0
        uniform = self._random.uniform(
            Purpose.ACCEPT,
            position=key.position,
            drafter_index=key.drafter_index,
            branch_idx=key.branch_idx,
            trial=key.trial,
        )
        return uniform < probability

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:
        """Draw with the position's FINAL uniform; see :class:`Chooser`."""
        return draw(law, self._random.uniform(Purpose.FINAL, position=position))
