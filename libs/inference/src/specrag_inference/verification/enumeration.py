"""Exact output laws: run a random procedure down every branch of its choices.

The instrument by which a verification rule is proved: a procedure that makes all its random choices
through a :class:`~specrag_inference.verification.chooser.Chooser` is executed once for every
sequence of choices that has a positive probability.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from specrag_inference.verification.chooser import TrialKey

Outcome = TypeVar("Outcome")


class EnumeratingChooser:
    """A chooser that follows a script, then takes the first possible option of every choice.

    Attributes:
        probability: of the choices made so far.
        untaken: scripts of the options passed over behind the end of the script.
    """

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        """Follow ``script``: the option taken at each choice, by index."""
        self._script = script
        self._taken: list[int] = []
        self.probability = 1.0
        self.untaken: list[tuple[int, ...]] = []

    def choose(self, weights: Sequence[float]) -> int:
        """Take one option; ``weights`` sum to 1, those of 0 are impossible."""
        possible = [idx for idx, weight in enumerate(weights) if weight > 0.0]
        num_taken = len(self._taken)
        if num_taken < len(self._script):
            option = self._script[num_taken]
        else:
            option, *others = possible
            self.untaken += [(*self._taken, other) for other in others]
        self._taken.append(option)
        self.probability *= weights[option]
        return option

    def accept(self, probability: float, key: TrialKey) -> bool:  # noqa: ARG002 - part of the seam
        """Take both branches; see :class:`~specrag_inference.verification.chooser.Chooser`."""
        return self.choose([probability, 1.0 - probability]) == 0

    def draw(self, law: NDArray[np.floating[Any]], *, position: int) -> int:  # noqa: ARG002 - part of the seam
        """Take every token; see :class:`~specrag_inference.verification.chooser.Chooser`."""
        weights = law.astype(np.float64)
        return self.choose((weights / weights.sum()).tolist())


def enumerate_outcomes(
    procedure: Callable[[EnumeratingChooser], Outcome],
) -> Iterator[tuple[float, Outcome]]:
    """Yield every execution of ``procedure`` with its probability; these sum to 1.

    Args:
        procedure: a pure function of its chooser. It runs once an outcome.
    """
    pending: list[tuple[int, ...]] = [()]
    while pending:
        chooser = EnumeratingChooser(pending.pop())
        outcome = procedure(chooser)
        pending += chooser.untaken
        yield chooser.probability, outcome
