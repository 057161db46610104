"""How long a round waits for a drafter's proposal: a function of earlier rounds only.

A wait fixed before the round begins cannot depend on the tokens proposed in it, so that leaving a
late proposal out does not bias the output law. The estimate is that of TCP's retransmission timer
(mean plus four mean deviations).

Source: RFC 6298, section 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_MEAN_GAIN = 0.125
_DEVIATION_GAIN = 0.25
_NUM_DEVIATIONS = 4.0
_PACE_GAIN = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitBounds:
    """Limits of the wait, in seconds.

    Attributes:
        first_s: longest wait in the first round, once the target is ready to verify.
        min_s: shortest wait in later rounds.
        max_s: longest wait in later rounds.
    """

    first_s: float = 0.05
    min_s: float = 0.01
    max_s: float = 0.5


@dataclass(frozen=True, slots=True)
class LatencyEstimate:
    """Running mean and mean deviation of one drafter's time from request to proposal, in seconds.

    Attributes:
        mean_s: mean; ``None`` before the first observation.
        deviation_s: mean absolute deviation.
    """

    mean_s: float | None = None
    deviation_s: float = 0.0

    def observe(self, latency_s: float) -> LatencyEstimate:
        """Return the estimate after another proposal."""
        if self.mean_s is None:
            return LatencyEstimate(latency_s, latency_s / 2)
        error = latency_s - self.mean_s
        return LatencyEstimate(
            self.mean_s + _MEAN_GAIN * error,
            self.deviation_s + _DEVIATION_GAIN * (abs(error) - self.deviation_s),
        )

    def compute_wait(self, bounds: WaitBounds) -> float:
        """Return the seconds to wait; the longest allowed before anything was observed."""
        if self.mean_s is None:
            return bounds.max_s
        wait = self.mean_s + _NUM_DEVIATIONS * self.deviation_s
        return min(bounds.max_s, max(bounds.min_s, wait))


@dataclass(slots=True)
class DrafterPace:
    """How fast one drafter answers, learned from the answers of all requests.

    Attributes:
        latency: its time from request to proposal.
        reply_s: mean of that time less the drafting: the way there and back, and its queue.
        token_s: mean time it drafts for a token of a branch.
    """

    latency: LatencyEstimate = field(default_factory=LatencyEstimate)
    reply_s: float = 0.0
    token_s: float = 0.0

    def observe(self, latency_s: float, *, draft_s: float, gamma: int) -> None:
        """Learn from one answer.

        Args:
            latency_s: from request to proposal.
            draft_s: of that, what the drafter says it worked.
            gamma: tokens a branch it was asked for; 0 when it had nothing to propose.
        """
        is_first = self.latency.mean_s is None
        self.latency = self.latency.observe(latency_s)
        gain = 1.0 if is_first else _PACE_GAIN
        self.reply_s += gain * (max(0.0, latency_s - draft_s) - self.reply_s)
        if gamma:
            token_s = min(draft_s, latency_s) / gamma
            self.token_s += (gain if self.token_s else 1.0) * (token_s - self.token_s)

    def compute_wait(self, bounds: WaitBounds) -> float:
        """Return the seconds to wait; see :meth:`LatencyEstimate.compute_wait`."""
        return self.latency.compute_wait(bounds)
