"""What a target pass costs by the number of tree nodes in it, learned from measured passes.

A pass over n nodes is taken to cost ``base + slope * n`` seconds. The two are fitted by decayed
least squares; with little variation in n the slope leans on a prior, so that a few odd passes do
not turn drafting off. Only sizes and times of earlier rounds enter: a length chosen from them
depends on no token about to be verified.
"""

from __future__ import annotations

from typing import Final

PRIOR_SLOPE: Final = 0.01
"""Cost of a node before anything was measured, in units of the pass without nodes."""

_DECAY: Final = 0.98
_PRIOR_WEIGHT: Final = 64.0
_MAX_SLOPE: Final = 0.5
_MAX_OUTLIER: Final = 3.0


class StepCosts:
    """Running fit over the passes of one target; shared by all its answers."""

    __slots__ = ("_weight", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        """Begin with the prior alone."""
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def base_s(self) -> float:
        """Seconds of a pass without nodes; 0 before the first."""
        if not self._weight:
            return 0.0
        return self._y / self._weight / (1.0 + self.slope * self._x / self._weight)

    @property
    def slope(self) -> float:
        """Cost of one node in units of a pass without nodes, 0 to 0.5."""
        if not self._weight:
            return PRIOR_SLOPE
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx - self._weight * mean_x * mean_x
        covariance = self._xy - self._weight * mean_x * mean_y
        prior = PRIOR_SLOPE * mean_y
        slope_s = (covariance + _PRIOR_WEIGHT * prior) / (variance + _PRIOR_WEIGHT)
        base_s = max(mean_y - slope_s * mean_x, mean_y * 0.1)
        return min(max(slope_s / base_s, 0.0), _MAX_SLOPE)

    def observe(self, num_nodes: int, seconds: float) -> None:
        """Learn from one pass; one that took much longer than expected counts as three times."""
        expected_s = self.base_s * (1.0 + self.slope * num_nodes)
        if expected_s:
            seconds = min(seconds, _MAX_OUTLIER * expected_s)
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + num_nodes
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + num_nodes * num_nodes
        self._xy = self._xy * _DECAY + num_nodes * seconds
