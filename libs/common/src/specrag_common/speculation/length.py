"""How many tokens to draft in the next round.

A pure function of earlier rounds' outcomes: a length chosen from the tokens about to be verified
would bias the output law. Per-token acceptance is estimated from decayed counts (accepted tokens
over trials, where a round has one trial more than acceptances when it ended in a rejection); the
length maximises expected tokens per unit of cost.

Source: Leviathan et al., arXiv 2211.17192, section 3.3 (their alpha is ``acceptance``, c the draft
cost, gamma ours).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Self

DEFAULT_MAX_GAMMA = 8
"""Most draft tokens a branch: on the CPUs measured, verifying 8 tokens costs what 1 costs."""

_DECAY = 0.9
_PROBE_INTERVAL = 16
_PROBE_GAMMA = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """What a round costs, in units of one plain decode step of the target.

    Attributes:
        verify_per_token: extra cost of each token in the verification pass.
        draft_per_token: cost of drafting one token; 0 for suffix drafts.
        round_overhead: cost of a round with drafts beyond one without (merging, messages).
    """

    verify_per_token: float = 0.004
    draft_per_token: float = 0.0
    round_overhead: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` on a negative cost."""
        for name, value in asdict(self).items():
            if not value >= 0:
                raise ValueError(f"{name}={value} must be at least 0")

    def compute_cost(self, gamma: int) -> float:
        """Return the cost of a round with ``gamma`` draft tokens."""
        if gamma == 0:
            return 1.0
        return 1.0 + self.round_overhead + gamma * (self.verify_per_token + self.draft_per_token)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthState:
    """History of one drafter in one session, decayed; small, immutable, serialisable.

    Attributes:
        accepted: decayed number of accepted tokens; starts as a prior.
        trials: decayed number of tokens that were accepted or rejected.
        idle_rounds: rounds since the drafter last proposed anything.
    """

    accepted: float = 2.0
    trials: float = 3.0
    idle_rounds: int = 0

    @property
    def acceptance(self) -> float:
        """Estimated probability that a proposed token is accepted, given that it is tried."""
        return self.accepted / self.trials

    def observe(self, *, num_accepted: int, num_proposed: int) -> LengthState:
        """Return the state after a round.

        Args:
            num_accepted: leading proposed tokens that were committed.
            num_proposed: tokens of the branch; 0 when the drafter did not propose.

        Raises:
            ValueError: not 0 <= num_accepted <= num_proposed.
        """
        if not 0 <= num_accepted <= num_proposed:
            raise ValueError(f"num_accepted={num_accepted} is outside [0, {num_proposed}]")
        if num_proposed == 0:
            return LengthState(
                accepted=self.accepted, trials=self.trials, idle_rounds=self.idle_rounds + 1
            )
        num_trials = num_accepted + (num_accepted < num_proposed)
        return LengthState(
            accepted=self.accepted * _DECAY + num_accepted,
            trials=self.trials * _DECAY + num_trials,
        )

    def to_dict(self) -> dict[str, float]:
        """Return the state as plain numbers."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, float]) -> Self:
        """Return the state that :meth:`to_dict` described.

        Raises:
            ValueError: a number is missing or makes no sense.
        """
        try:
            state = cls(
                accepted=float(data["accepted"]),
                trials=float(data["trials"]),
                idle_rounds=int(data["idle_rounds"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a length state: {data!r}") from error
        if not (0 <= state.accepted <= state.trials and state.trials > 0 <= state.idle_rounds):
            raise ValueError(f"not a length state: {data!r}")
        return state


def choose_gamma(
    state: LengthState, costs: CostModel, *, max_gamma: int = DEFAULT_MAX_GAMMA
) -> int:
    """Return the number of tokens a branch to draft next, 0 to ``max_gamma``.

    A drafter that does not pay gets 0, with a short probe every 16 rounds so that a change of
    subject is noticed.
    """
    best = max(
        range(max_gamma + 1),
        key=lambda gamma: (
            compute_expected_tokens(state.acceptance, gamma) / costs.compute_cost(gamma)
        ),
    )
    if best == 0 and state.idle_rounds >= _PROBE_INTERVAL - 1:
        return min(_PROBE_GAMMA, max_gamma)
    return best


def compute_expected_tokens(acceptance: float, gamma: int) -> float:
    """Return the expected tokens of a round: 1 + a + a² + … + a^gamma."""
    if acceptance >= 1.0:
        return gamma + 1.0
    return float((1.0 - acceptance ** (gamma + 1)) / (1.0 - acceptance))
