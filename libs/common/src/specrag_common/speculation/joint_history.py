"""What several drafters of an answer do together: how far they add to each other.

The tree accepts the longest branch that agrees, so d tokens are accepted when any drafter's first d
are. How often that is lies between two bounds, and where it lies is measured: from the tokens that
the other drafters added where the best one's branch had ended.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FIRST_PAUSE: Final = 8
"""Fewest tokens decoded alone before a probe."""

LONGEST_PAUSE: Final = 128

_KEPT: Final = 0.95
_PRIOR_TOKENS: Final = 1.0
_PRIOR_INDEPENDENCE: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class JointHistory:
    """What is known of an answer's drafters together; decayed sums.

    Attributes:
        expected: tokens that the others would have added to the best drafter's, were all
            independent: where its branch had ended already, as far as theirs should have reached.
        gained: tokens that they did add.
        nodes: nodes of the merged trees.
        proposed: nodes of the drafters' own trees.
        pause: tokens to decode alone before the next probe.
    """

    expected: float = 0.0
    gained: float = 0.0
    nodes: float = 0.0
    proposed: float = 0.0
    pause: int = FIRST_PAUSE

    @property
    def independence(self) -> float:
        """Where the drafters lie between agreeing always, 0, and independence, 1."""
        gained = self.gained + _PRIOR_INDEPENDENCE * _PRIOR_TOKENS
        return min(gained / (self.expected + _PRIOR_TOKENS), 1.0)

    @property
    def distinct_share(self) -> float:
        """Nodes of a merged tree for each node of the drafters' own trees; 1: they disagree."""
        return (self.nodes + 1.0) / (self.proposed + 1.0)

    def observe(
        self,
        survivals: Sequence[Sequence[float]],
        accepted: Sequence[int],
        *,
        num_nodes: int,
        own: int,
    ) -> JointHistory:
        """Return the history after a round in which two drafters or more proposed.

        Args:
            survivals: of each of them, as estimated before the round.
            accepted: leading tokens accepted of the first branch of each.
            num_nodes: nodes of the merged tree.
            own: nodes of their own trees, added up.
        """
        best = max(range(len(survivals)), key=lambda idx: survivals[idx][0])
        others = [one for idx, one in enumerate(survivals) if idx != best]
        expected = sum(combine_survival(others, 1.0)[accepted[best] :])
        return replace(
            self.fade(),
            expected=self.expected * _KEPT + expected,
            gained=self.gained * _KEPT + max(accepted) - accepted[best],
            nodes=self.nodes * _KEPT + num_nodes,
            proposed=self.proposed * _KEPT + own,
        )

    def fade(self) -> JointHistory:
        """Return the history after a round that says nothing of the drafters together."""
        return replace(
            self,
            expected=self.expected * _KEPT,
            gained=self.gained * _KEPT,
            nodes=self.nodes * _KEPT,
            proposed=self.proposed * _KEPT,
        )

    def after_probe(self, *, succeeded: bool) -> JointHistory:
        """Return the history with the next pause: the first one again, or twice the last."""
        pause = FIRST_PAUSE if succeeded else min(2 * self.pause, LONGEST_PAUSE)
        return replace(self, pause=pause)

    def to_dict(self) -> dict[str, float]:
        """Return the history as plain numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Self:
        """Return the history that :meth:`to_dict` described.

        Raises:
            ValueError: a number is missing or makes no sense.
        """
        try:
            numbers = {name: float(data[name]) for name in asdict(cls())}
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a joint history: {data!r}") from error
        pause = numbers.pop("pause")
        is_sane = all(0 <= value < float("inf") for value in numbers.values())
        if not (is_sane and 1 <= pause <= LONGEST_PAUSE):
            raise ValueError(f"not a joint history: {data!r}")
        return cls(**numbers, pause=int(pause))


def combine_survival(survivals: Sequence[Sequence[float]], independence: float) -> list[float]:
    """Return the probability that 1, 2, … tokens are accepted of any of several drafters.

    Args:
        survivals: of each drafter, as long as what it is asked for.
        independence: 0: they agree always; 1: independent.
    """
    combined = []
    for depth in range(max(map(len, survivals), default=0)):
        here = [survival[depth] for survival in survivals if depth < len(survival)]
        none = 1.0
        for one in here:
            none *= 1.0 - one
        combined.append((1.0 - independence) * max(here) + independence * (1.0 - none))
    return combined
