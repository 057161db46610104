"""Times of an answer's rounds, told apart into what the choice of drafting looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrag_common.speculation.step_costs import StepCosts
    from specrag_common.wire.verified import VerifiedTokens


class RoundTimes:
    """Feeds one answer's times into the costs that all answers of a target share."""

    def __init__(self, costs: StepCosts) -> None:
        """Learn into ``costs``."""
        self._costs = costs
        self._sent_s: float | None = None
        self._verified_s: float | None = None

    def note_sent(self, now: float | None) -> None:
        """A round goes to the target; ``None``: not to be timed, it waits for something else."""
        self._sent_s = now
        self._verified_s = None

    def note_verified(self, verified: VerifiedTokens, now: float, *, num_nodes: int) -> None:
        """The target answered.

        Args:
            verified: what it says.
            now: seconds on the driver's clock.
            num_nodes: of the tree; 0 for a token decoded alone.
        """
        forward_s = verified.forward_time_us / 1e6
        # A target that does not tell how full the pass was is taken to have run this answer alone.
        self._costs.observe_pass(
            num_tokens=verified.num_pass_tokens or 1 + num_nodes,
            num_sequences=verified.num_pass_sequences or 1,
            seconds=forward_s,
        )
        if self._sent_s is not None:
            self._costs.observe_round(now - self._sent_s - forward_s)
        elif self._verified_s is not None:
            self._costs.observe_alone(now - self._verified_s - forward_s)
        self._sent_s = None
        self._verified_s = now
