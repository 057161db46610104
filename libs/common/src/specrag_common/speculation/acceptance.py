"""How much of what a drafter proposes is accepted: a decayed history, small and serialisable.

Survival is estimated depth by depth (Kaplan and Meier, 1958): the share of rounds that got through
depth d, of those that got through depth d - 1 and asked for more. So rounds of different lengths
count together, and a round in which the drafter had nothing to propose counts as a rejection. A
depth seldom tried leans on the share over all depths. Only outcomes of decided rounds enter.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

NUM_DEPTHS: Final = 8
"""Depths with a history of their own; deeper ones count as the last."""

NUM_RANKS: Final = 4
"""Branches of a source with a history of their own; further ones count as the last."""

_KEPT_PER_TOKEN: Final = 0.96
_LEAST_WEIGHT: Final = 2.0
_HALF_LIFE_TOKENS: Final = 64.0
_LEANING: Final = 2.0
_PRIOR_WEIGHT: Final = 3.0
_PRIOR_GREEDY: Final = 0.6
_PRIOR_SAMPLED: Final = 0.35
_PRIOR_FORK_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """What became of one drafter's proposal.

    Attributes:
        gamma: tokens a branch that were asked for; at least 1.
        accepted_by_rank: leading tokens accepted of the first branches of all sources, of the
            second, and so on; empty when it proposed nothing.
        nodes_by_rank: tree nodes that those branches added to the ones before.
    """

    gamma: int
    accepted_by_rank: tuple[int, ...] = ()
    nodes_by_rank: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Leading tokens accepted of the first branches."""
        return self.accepted_by_rank[0] if self.accepted_by_rank else 0

    @property
    def num_nodes(self) -> int:
        """Distinct tokens proposed."""
        return sum(self.nodes_by_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceHistory:
    """One drafter's history in one session; decayed sums, so that what was long ago fades.

    Attributes:
        tried: rounds that asked for the depth and whose first branch got through all before, by
            depth.
        accepted: those of them that got through it, by depth.
        prior: share of accepted tokens to expect of a drafter nothing is known of.
        asked_tokens: tokens a branch that were asked for.
        nodes: distinct tokens that were proposed by the first branches.
        fork_rounds: rounds with the branch, by rank from the second on.
        fork_tokens: accepted tokens it added to the branches before it.
        fork_nodes: nodes it added.
    """

    tried: tuple[float, ...]
    accepted: tuple[float, ...]
    prior: float
    asked_tokens: float = 0.0
    nodes: float = 0.0
    fork_rounds: tuple[float, ...] = (0.0,) * (NUM_RANKS - 1)
    fork_tokens: tuple[float, ...] = (0.0,) * (NUM_RANKS - 1)
    fork_nodes: tuple[float, ...] = (0.0,) * (NUM_RANKS - 1)

    @classmethod
    def begin(cls, temperature: float = 0.0) -> Self:
        """Return the history of a drafter nothing is known of.

        Args:
            temperature: of the request; what is drawn is guessed less often than what is likeliest.
        """
        sampled = min(max(temperature, 0.0), 1.0)
        prior = _PRIOR_GREEDY + sampled * (_PRIOR_SAMPLED - _PRIOR_GREEDY)
        rest = (0.0,) * (NUM_DEPTHS - 1)
        return cls(
            tried=(_PRIOR_WEIGHT, *rest), accepted=(_PRIOR_WEIGHT * prior, *rest), prior=prior
        )

    @property
    def acceptance(self) -> float:
        """Estimated probability that a token is accepted when all before it are."""
        return sum(self.accepted) / sum(self.tried)

    @property
    def fill(self) -> float:
        """Estimated nodes of a first branch for each token asked for."""
        return (self.nodes + 1.0) / (self.asked_tokens + 1.0)

    def compute_survival(self, gamma: int) -> list[float]:
        """Return the probability that 1, 2, … ``gamma`` tokens of a first branch are accepted."""
        pooled = self.acceptance
        survival, product = [], 1.0
        for depth in range(gamma):
            idx = min(depth, NUM_DEPTHS - 1)
            product *= (self.accepted[idx] + _LEANING * pooled) / (self.tried[idx] + _LEANING)
            survival.append(product)
        return survival

    def compute_fork(self, rank: int) -> tuple[float, float]:
        """Return (accepted tokens, nodes) that the branch of ``rank`` >= 1 adds to a round."""
        idx = min(rank, NUM_RANKS - 1) - 1
        rounds = self.fork_rounds[idx] + 1.0
        tokens = self.fork_tokens[idx] + _PRIOR_FORK_SHARE * self.acceptance
        return tokens / rounds, (self.fork_nodes[idx] + 1.0) / rounds

    def observe(self, outcome: RoundOutcome) -> AcceptanceHistory:
        """Return the history with one more round.

        Raises:
            ValueError: more was accepted than asked for.
        """
        if not 0 <= outcome.num_accepted <= outcome.gamma:
            raise ValueError(
                f"num_accepted={outcome.num_accepted} is outside [0, gamma={outcome.gamma}]"
            )
        tried, accepted = list(self.tried), list(self.accepted)
        for depth in range(min(outcome.num_accepted + 1, outcome.gamma)):
            idx = min(depth, NUM_DEPTHS - 1)
            tried[idx] += 1.0
            accepted[idx] += depth < outcome.num_accepted
        forks = list(zip(self.fork_rounds, self.fork_tokens, self.fork_nodes, strict=True))
        for idx, (gained, nodes) in enumerate(_list_forks(outcome)):
            rounds, fork_tokens, fork_nodes = forks[idx]
            forks[idx] = (rounds + 1.0, fork_tokens + gained, fork_nodes + nodes)
        return AcceptanceHistory(
            tried=tuple(tried),
            accepted=tuple(accepted),
            prior=self.prior,
            asked_tokens=self.asked_tokens + outcome.gamma,
            nodes=self.nodes + sum(outcome.nodes_by_rank[:1]),
            fork_rounds=tuple(one[0] for one in forks),
            fork_tokens=tuple(one[1] for one in forks),
            fork_nodes=tuple(one[2] for one in forks),
        )

    def fade(self, num_tokens: int) -> AcceptanceHistory:
        """Return the history ``num_tokens`` committed tokens later: the same shares, worth less."""
        kept = _KEPT_PER_TOKEN**num_tokens
        share = max(kept, min(1.0, _LEAST_WEIGHT / sum(self.tried)))
        return AcceptanceHistory(
            tried=_scale(self.tried, share),
            accepted=_scale(self.accepted, share),
            prior=self.prior,
            asked_tokens=self.asked_tokens * share,
            nodes=self.nodes * share,
            fork_rounds=_scale(self.fork_rounds, kept),
            fork_tokens=_scale(self.fork_tokens, kept),
            fork_nodes=_scale(self.fork_nodes, kept),
        )

    def forget(self, num_tokens: int) -> AcceptanceHistory:
        """Return the history of a drafter left out while others were asked.

        It comes a little nearer to that of one nothing is known of: so it is tried again.
        """
        kept = 0.5 ** (num_tokens / _HALF_LIFE_TOKENS)
        faded = replace(self, tried=_scale(self.tried, kept), accepted=_scale(self.accepted, kept))
        weight = _PRIOR_WEIGHT * (1.0 - kept)
        return replace(
            faded,
            tried=(faded.tried[0] + weight, *faded.tried[1:]),
            accepted=(faded.accepted[0] + weight * self.prior, *faded.accepted[1:]),
        )

    def to_dict(self) -> dict[str, float]:
        """Return the history as plain numbers by name."""
        numbers: dict[str, float] = {}
        for name, value in asdict(self).items():
            if isinstance(value, float):
                numbers[name] = value
            else:
                numbers.update((f"{name}.{idx}", one) for idx, one in enumerate(value))
        return numbers

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Self:
        """Return the history that :meth:`to_dict` described.

        Raises:
            ValueError: a number is missing or makes no sense.
        """

        def read(name: str, size: int) -> tuple[float, ...]:
            return tuple(float(data[f"{name}.{idx}"]) for idx in range(size))

        try:
            history = cls(
                tried=read("tried", NUM_DEPTHS),
                accepted=read("accepted", NUM_DEPTHS),
                prior=float(data["prior"]),
                asked_tokens=float(data["asked_tokens"]),
                nodes=float(data["nodes"]),
                fork_rounds=read("fork_rounds", NUM_RANKS - 1),
                fork_tokens=read("fork_tokens", NUM_RANKS - 1),
                fork_nodes=read("fork_nodes", NUM_RANKS - 1),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an acceptance history: {data!r}") from error
        parts = zip(history.accepted, history.tried, strict=True)
        is_sane = all(0 <= accepted <= tried < float("inf") for accepted, tried in parts)
        if not (is_sane and sum(history.tried) > 0 and all(one >= 0 for one in data.values())):
            raise ValueError(f"not an acceptance history: {data!r}")
        return history


def _scale(values: Sequence[float], share: float) -> tuple[float, ...]:
    return tuple(value * share for value in values)


def _list_forks(outcome: RoundOutcome) -> Iterable[tuple[int, int]]:
    """Yield (accepted tokens gained, nodes added) of the second branches and the further ones."""
    best = [0]
    for accepted in outcome.accepted_by_rank[:NUM_RANKS]:
        best.append(max(best[-1], accepted))
    gains = [after - before for before, after in pairwise(best)]
    return list(zip(gains[1:], outcome.nodes_by_rank[1:NUM_RANKS], strict=True))
