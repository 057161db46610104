"""How to draft in the next round: whom to ask, how much, and whether at all.

A pure function of earlier rounds: a shape chosen from the tokens about to be verified would bias
the output law. What is maximised is expected tokens a second:

    (1 + sum over d of P(some drafter's first d tokens are accepted)) / seconds of the round

against ``1 / seconds of a token`` of the target alone, without a round trip a token.

*Tokens.* The tree accepts the longest branch that agrees, so d tokens are accepted when any
drafter's first d are. Were drafters independent, that is ``1 - prod(1 - survival_i(d))``; were they
to agree always, ``max survival_i(d)``. The truth is taken to lie between the two, at a place that
is measured (``joint_history``).

*Seconds.* Waiting for the slowest drafter asked, the round trip, the pass, and its nodes. A node
makes a shared pass slower for everybody in it, and all answers choose alike: it is charged once for
each sequence of the pass. That is what turns drafting down under load.

*Choice.* A depth is worth asking for when the tokens it adds are worth more, at the rate reached,
than its nodes cost (Dinkelbach, 1967: iterating that maximises the ratio). The same price, as a
probability, goes to the suffix drafters: a node less likely to be reached than
``seconds of a node * tokens a second`` is not worth its place.

Where drafting does not pay the target decodes alone for a while, then a cheap probe is made; the
pauses double as long as probes fail.

Source: Leviathan et al., arXiv 2211.17192, section 3.3, for one drafter and no waiting.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag_common.speculation.joint_history import (
    LONGEST_PAUSE,
    JointHistory,
    combine_survival,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specrag_common.speculation.acceptance import AcceptanceHistory

DEFAULT_MAX_GAMMA: Final = 8
"""Most draft tokens a branch."""

DEFAULT_MAX_BRANCHES: Final = 4
"""Most branches a source."""

_PROBE_GAMMA: Final = 4
_PROBE_SHARE: Final = 0.05
_PROBE_SLACK: Final = 0.1
_SAME_REPLY: Final = 0.01
_NUM_ITERATIONS: Final = 3
_LEAST_PRICE: Final = 0.02
_HIGHEST_PRICE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOutlook:
    """What is known of one drafter that could be asked.

    Attributes:
        index: the drafter.
        history: its acceptance.
        reply_s: expected seconds from asking to its proposal, without drafting.
        token_s: seconds it drafts for each token of a branch.
    """

    index: int
    history: AcceptanceHistory
    reply_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPrices:
    """What a round costs at present, in seconds.

    Attributes:
        plain_s: a pass without drafts.
        node_s: what a node adds to the pass, times the sequences it delays.
        round_s: a round trip, beside waiting and pass.
        alone_s: a token that the target decodes alone, beside its pass.
    """

    plain_s: float
    node_s: float
    round_s: float = 0.0
    alone_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How much to ask one drafter for."""

    gamma: int
    num_branches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """The next round.

    Attributes:
        asks: by drafter; empty: the target decodes alone.
        min_probability: price of a node: what it must be reached with to be worth its place.
        tokens_per_s: expected.
    """

    asks: Mapping[int, Ask] = field(default_factory=dict)
    min_probability: float
    tokens_per_s: float


def plan_round(
    drafters: Sequence[DrafterOutlook],
    joint: JointHistory,
    prices: RoundPrices,
    *,
    max_gamma: int = DEFAULT_MAX_GAMMA,
    max_branches: int = DEFAULT_MAX_BRANCHES,
) -> RoundPlan:
    """Return the round with the most expected tokens a second.

    Args:
        drafters: those that could be asked.
        joint: what is known of them together.
        prices: what things cost.
        max_gamma: most tokens a branch.
        max_branches: most branches a source.
    """
    alone = 1.0 / (prices.plain_s + prices.alone_s)
    best = RoundPlan(min_probability=_get_price(prices, alone), tokens_per_s=alone)
    if max_gamma < 1:
        return best
    by_reply = sorted(drafters, key=lambda one: one.reply_s)
    for count, slowest in enumerate(by_reply, 1):
        same_s = slowest.reply_s + _SAME_REPLY * prices.plain_s
        if count < len(by_reply) and by_reply[count].reply_s <= same_s:
            continue  # waiting for the next one too costs next to nothing
        search = _Search(by_reply[:count], joint, prices, max_gamma, max_branches)
        plan = search.run(best.tokens_per_s)
        if plan.tokens_per_s > best.tokens_per_s:
            best = plan
    return best


def plan_probe(
    drafters: Sequence[DrafterOutlook],
    prices: RoundPrices,
    *,
    max_gamma: int = DEFAULT_MAX_GAMMA,
    max_branches: int = DEFAULT_MAX_BRANCHES,
) -> RoundPlan:
    """Return a cheap round that shows whether drafting pays again: far drafters are left out."""
    alone = 1.0 / (prices.plain_s + prices.alone_s)
    near, _ = _list_near(drafters, prices)
    ask = Ask(gamma=min(_PROBE_GAMMA, max_gamma), num_branches=min(2, max_branches))
    return RoundPlan(
        asks={one.index: ask for one in near} if ask.gamma else {},
        min_probability=_get_price(prices, alone),
        tokens_per_s=alone,
    )


def choose_pause(
    drafters: Sequence[DrafterOutlook], joint: JointHistory, prices: RoundPrices
) -> int:
    """Return the tokens to decode alone before a probe: a probe may cost 5 percent.

    Args:
        drafters: those that could be asked.
        joint: tells how many probes failed in a row.
        prices: what things cost.
    """
    near, wait_s = _list_near(drafters, prices)
    probe_s = prices.round_s + wait_s + len(near) * _PROBE_GAMMA * prices.node_s
    affordable = math.ceil(probe_s / (_PROBE_SHARE * (prices.plain_s + prices.alone_s)))
    return min(max(joint.pause, affordable), LONGEST_PAUSE)


def _list_near(
    drafters: Sequence[DrafterOutlook], prices: RoundPrices
) -> tuple[list[DrafterOutlook], float]:
    """Return the drafters hardly slower than the quickest, and the wait for a probe's tokens."""
    waits = {one.index: one.reply_s + _PROBE_GAMMA * one.token_s for one in drafters}
    longest = min(waits.values(), default=0.0) + _PROBE_SLACK * prices.plain_s
    near = [one for one in drafters if waits[one.index] <= longest]
    return near, max((waits[one.index] for one in near), default=0.0)


class _Search:
    """The best lengths for a set of drafters that are all waited for."""

    def __init__(
        self,
        drafters: Sequence[DrafterOutlook],
        joint: JointHistory,
        prices: RoundPrices,
        max_gamma: int,
        max_branches: int,
    ) -> None:
        self._survivals = {one.index: one.history.compute_survival(max_gamma) for one in drafters}
        # Whoever promises most comes first: the others count for what they add to it.
        self._drafters = sorted(drafters, key=lambda one: -self._survivals[one.index][0])
        self._independence = joint.independence
        self._share = joint.distinct_share if len(drafters) > 1 else 1.0
        self._prices = prices
        self._max_gamma = max_gamma
        self._max_branches = max_branches

    def run(self, rate: float) -> RoundPlan:
        """Return the best plan; ``rate`` is what can be had without it."""
        plan = RoundPlan(min_probability=_get_price(self._prices, rate), tokens_per_s=0.0)
        for _ in range(_NUM_ITERATIONS):
            candidate = self._choose(max(rate, plan.tokens_per_s))
            if candidate.tokens_per_s <= plan.tokens_per_s:
                break
            plan = candidate
        return plan

    def _choose(self, rate: float) -> RoundPlan:
        """Return the plan whose every depth and branch is worth its cost at ``rate``."""
        asks: dict[int, Ask] = {}
        kept: list[list[float]] = []
        tokens, nodes, wait_s = 1.0, 0.0, 0.0
        for drafter in self._drafters:
            gamma, gained = self._choose_gamma(drafter, kept, rate)
            if not gamma:
                continue
            kept.append(self._survivals[drafter.index][:gamma])
            missed = 1.0 - (combine_survival(kept[:-1], self._independence) or [0.0])[0]
            branches, forked, fork_nodes = self._choose_branches(drafter, gamma, rate, missed)
            asks[drafter.index] = Ask(gamma=gamma, num_branches=branches)
            tokens += gained + forked
            nodes += drafter.history.fill * gamma * self._share + fork_nodes
            wait_s = max(wait_s, drafter.reply_s + gamma * drafter.token_s)
        prices = self._prices
        seconds = prices.plain_s + prices.round_s + wait_s + nodes * prices.node_s
        return RoundPlan(
            asks=asks,
            min_probability=_get_price(prices, tokens / seconds),
            tokens_per_s=tokens / seconds if asks else 0.0,
        )

    def _choose_gamma(
        self, drafter: DrafterOutlook, others: Sequence[Sequence[float]], rate: float
    ) -> tuple[int, float]:
        """Return the length to ask for and the tokens it adds to what ``others`` give."""
        own = self._survivals[drafter.index]
        before = combine_survival(others, self._independence)
        after = combine_survival([*others, own], self._independence)
        cost = self._prices.node_s * drafter.history.fill * self._share + drafter.token_s
        best_gamma, best_worth, best_gain, gained = 0, 0.0, 0.0, 0.0
        for depth in range(self._max_gamma):
            gained += after[depth] - (before[depth] if depth < len(before) else 0.0)
            worth = gained - rate * cost * (depth + 1)
            if worth > best_worth:
                best_gamma, best_worth, best_gain = depth + 1, worth, gained
        return best_gamma, best_gain

    def _choose_branches(
        self, drafter: DrafterOutlook, gamma: int, rate: float, missed: float
    ) -> tuple[int, float, float]:
        """Return (branches, accepted tokens, nodes); the last two of those behind the first.

        Args:
            drafter: whose branches.
            gamma: most tokens of each.
            rate: tokens a second that can be had.
            missed: how often the other drafters leave room for them.
        """
        branches, tokens, nodes = 1, 0.0, 0.0
        for rank in range(1, self._max_branches):
            gained, added = drafter.history.compute_fork(rank)
            gained, added = gained * missed, min(added, float(gamma)) * self._share
            if gained <= rate * self._prices.node_s * added:
                break
            branches, tokens, nodes = rank + 1, tokens + gained, nodes + added
        return branches, tokens, nodes


def _get_price(prices: RoundPrices, rate: float) -> float:
    """Return the probability of being reached at which a node is just worth its place."""
    return min(max(prices.node_s * rate, _LEAST_PRICE), _HIGHEST_PRICE)
