"""What the target's rounds cost in seconds, learned from measured ones and shared by its answers.

A pass over t tokens of s sequences is taken to cost ``base + per_token * t + per_sequence * s``,
fitted by decayed least squares. With little variation ``per_token`` leans on a prior, so that a few
odd passes do not turn drafting off. That a pass is shared matters: with the load known, a slower
pass is not blamed on the tree. Beside the passes stand two running means of what is *not* forward
pass: of a round with a round trip, and of a token that the target decodes alone.

Only sizes and times of earlier rounds enter: what is chosen from them depends on no token about to
be verified.
"""

from __future__ import annotations

from typing import Final

import numpy as np

PRIOR_BASE_S: Final = 0.03
"""A pass before anything was measured."""

PRIOR_TOKEN_SHARE: Final = 0.02
"""Cost of a token before anything was measured, in units of a pass."""

_PRIOR_ROUND_SHARE: Final = 0.1
_KEPT: Final = 0.98
_MAX_OUTLIER: Final = 3.0
_GAIN: Final = 0.1
# Prior observations: tokens vary by about 4 a pass; sequences say little until they vary.
_TOKEN_RIDGE: Final = 64.0
_SEQUENCE_RIDGE: Final = 4.0


class StepCosts:
    """Running estimates over the passes of one target."""

    __slots__ = (
        "_alone_s",
        "_fitted",
        "_moments",
        "_num_rounds",
        "_round_s",
        "_sequences",
        "_sums",
        "_weight",
    )

    def __init__(self) -> None:
        """Begin with the priors alone."""
        self._weight = 0.0
        self._moments = np.zeros((3, 3))
        self._sums = np.zeros(3)
        self._sequences = 1.0
        self._fitted: tuple[float, float, float] | None = None
        self._num_rounds = 0
        self._round_s = 0.0
        self._alone_s = 0.0

    @property
    def num_sequences(self) -> float:
        """Sequences that share a pass at present, at least 1."""
        return self._sequences

    @property
    def token_s(self) -> float:
        """Seconds that one more token adds to a pass, at least 0."""
        return self._fit()[1]

    @property
    def plain_pass_s(self) -> float:
        """Seconds of a pass at the present load, were no sequence to bring a draft."""
        base_s, token_s, sequence_s = self._fit()
        seconds = base_s + (token_s + sequence_s) * self._sequences
        return max(seconds, 0.1 * base_s, 1e-6)

    @property
    def round_s(self) -> float:
        """Seconds of a round with a round trip that are neither waiting nor forward pass."""
        prior = _PRIOR_ROUND_SHARE * self.plain_pass_s
        trust = self._num_rounds / (self._num_rounds + 1.0)
        return prior + trust * (self._round_s - prior)

    @property
    def alone_s(self) -> float:
        """Seconds of a token decoded alone that are not forward pass."""
        return self._alone_s

    def observe_pass(self, *, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Learn from one pass; one that took much longer than expected counts as three times.

        Args:
            num_tokens: all of the pass, at least 1.
            num_sequences: that shared it, at least 1.
            seconds: of the forward pass.
        """
        row = np.array([1.0, num_tokens, num_sequences])
        if self._weight:
            expected_s = float(row @ self._fit())
            if expected_s > 0:
                seconds = min(seconds, _MAX_OUTLIER * expected_s)
        self._weight = self._weight * _KEPT + 1.0
        self._moments = self._moments * _KEPT + np.outer(row, row)
        self._sums = self._sums * _KEPT + row * seconds
        self._sequences += _GAIN * (num_sequences - self._sequences)
        self._fitted = None

    def observe_round(self, seconds: float) -> None:
        """Learn what a round trip took beside waiting and forward pass."""
        self._num_rounds += 1
        self._round_s = self._mix(self._round_s, seconds, 1.0 / self._num_rounds)

    def observe_alone(self, seconds: float) -> None:
        """Learn what a token decoded alone took beside its forward pass."""
        self._alone_s = self._mix(self._alone_s, seconds, _GAIN)

    def _mix(self, known: float, seconds: float, gain: float) -> float:
        """Return the running mean; a single odd value moves it by little."""
        bound = _MAX_OUTLIER * max(known, 0.1 * self.plain_pass_s)
        seconds = min(max(seconds, 0.0), bound)
        return known + max(gain, _GAIN) * (seconds - known)

    def _fit(self) -> tuple[float, float, float]:
        """Return (base_s, token_s, sequence_s), the last two at least 0."""
        if self._fitted is None:
            self._fitted = self._solve()
        return self._fitted

    def _solve(self) -> tuple[float, float, float]:
        if not self._weight:
            return PRIOR_BASE_S, PRIOR_TOKEN_SHARE * PRIOR_BASE_S, 0.0
        means = self._moments[0] / self._weight
        mean_s = self._sums[0] / self._weight
        spread = self._moments[1:, 1:] - self._weight * np.outer(means[1:], means[1:])
        shared = self._sums[1:] - self._weight * means[1:] * mean_s
        ridge = np.array([_TOKEN_RIDGE, _SEQUENCE_RIDGE])
        prior = np.array([PRIOR_TOKEN_SHARE * mean_s, 0.0])
        slopes = np.linalg.solve(spread + np.diag(ridge), shared + ridge * prior)
        token_s, sequence_s = (max(float(slope), 0.0) for slope in slopes)
        base_s = mean_s - token_s * means[1] - sequence_s * means[2]
        return max(float(base_s), 0.1 * float(mean_s)), token_s, sequence_s
