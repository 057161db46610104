"""The controller against worlds whose acceptance and costs are known.

A world draws how many tokens of each drafter's branch are accepted and says how long a round took.
The controller sees outcomes and times only, as in production. It is held against the best fixed
shape, found by trying them all on the world's true numbers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_common.speculation.acceptance import AcceptanceHistory, RoundOutcome
from specrag_common.speculation.controller import (
    DrafterOutlook,
    RoundPlan,
    RoundPrices,
    choose_pause,
    plan_probe,
    plan_round,
)
from specrag_common.speculation.joint_history import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    JointHistory,
    combine_survival,
)

PLAIN_S = 0.03
PRICES = RoundPrices(plain_s=PLAIN_S, node_s=0.0006, round_s=0.003, alone_s=0.0005)


@dataclass(frozen=True, kw_only=True)
class World:
    """True acceptance of each drafter's tokens, each drafter's delay, and what a round costs.

    ``shared`` is how often the drafters of a round draw the same luck: 1 they agree always.
    """

    acceptance: tuple[float, ...]
    reply_s: tuple[float, ...]
    prices: RoundPrices = PRICES
    shared: float = 0.3

    def draw(self, rng: random.Random, gammas: dict[int, int]) -> dict[int, int]:
        """Return the tokens accepted of each drafter asked."""
        common = [rng.random() for _ in range(8)]
        accepted = {}
        for index, gamma in gammas.items():
            luck = common if rng.random() < self.shared else [rng.random() for _ in range(8)]
            hits = [one < self.acceptance[index] for one in luck[:gamma]]
            accepted[index] = hits.index(False) if False in hits else gamma
        return accepted

    def measure(self, gammas: dict[int, int]) -> float:
        """Return the seconds of a round; every token asked for becomes a node."""
        wait_s = max(self.reply_s[index] for index in gammas)
        prices = self.prices
        nodes = sum(gammas.values())
        return prices.plain_s + prices.round_s + wait_s + nodes * prices.node_s

    @property
    def alone_rate(self) -> float:
        """Tokens a second without drafts."""
        return 1.0 / (self.prices.plain_s + self.prices.alone_s)

    def find_best_rate(self) -> float:
        """Return the tokens a second of the best fixed shape, or of none."""
        rng = random.Random(1)
        full = dict.fromkeys(range(len(self.acceptance)), 8)
        draws = np.array([list(self.draw(rng, full).values()) for _ in range(5000)])
        best = self.alone_rate
        for gammas in product((0, 1, 2, 3, 4, 6, 8), repeat=len(self.acceptance)):
            asked = {index: gamma for index, gamma in enumerate(gammas) if gamma}
            if asked:
                num_accepted = np.minimum(draws, gammas).max(axis=1).mean()
                best = max(best, (1 + float(num_accepted)) / self.measure(asked))
        return best


class Player:
    """Lets the controller play a world, learning as the round machine does."""

    def __init__(self, world: World, seed: int = 0) -> None:
        self.world = world
        self.histories = [AcceptanceHistory.begin() for _ in world.acceptance]
        self.joint = JointHistory()
        self.plans: list[RoundPlan] = []
        self.num_tokens, self.seconds = 0, 0.0
        self.rng = random.Random(seed)
        self.is_probe_due = False

    def look(self) -> list[DrafterOutlook]:
        return [
            DrafterOutlook(index=index, history=history, reply_s=self.world.reply_s[index])
            for index, history in enumerate(self.histories)
        ]

    def play(self, num_tokens: int) -> float:
        """Return the tokens a second over at least ``num_tokens``."""
        began = self.num_tokens, self.seconds
        while self.num_tokens - began[0] < num_tokens:
            drafters, prices = self.look(), self.world.prices
            plan = plan_round(drafters, self.joint, prices, max_branches=1)
            is_probe = not plan.asks and self.is_probe_due
            if is_probe:
                plan = plan_probe(drafters, prices, max_branches=1)
            self.plans.append(plan)
            self.is_probe_due = not plan.asks
            if plan.asks:
                self.verify({index: ask.gamma for index, ask in plan.asks.items()}, is_probe)
            else:
                self.decode_alone(choose_pause(drafters, self.joint, prices))
        return (self.num_tokens - began[0]) / (self.seconds - began[1])

    def verify(self, gammas: dict[int, int], is_probe: bool) -> None:
        accepted = self.world.draw(self.rng, gammas)
        best = max(accepted.values())
        self.num_tokens += 1 + best
        self.seconds += self.world.measure(gammas)
        if len(gammas) > 1:
            self.joint = self.joint.observe(
                [self.histories[index].compute_survival(one) for index, one in gammas.items()],
                list(accepted.values()),
                num_nodes=sum(gammas.values()),
                own=sum(gammas.values()),
            )
        else:
            self.joint = self.joint.fade()
        if is_probe:
            self.joint = self.joint.after_probe(succeeded=best > 0)
        for index, history in enumerate(self.histories):
            faded = history.fade(1 + best)
            if index not in gammas:
                self.histories[index] = faded.forget(1 + best)
                continue
            outcome = RoundOutcome(
                gamma=gammas[index],
                accepted_by_rank=(accepted[index],),
                nodes_by_rank=(gammas[index],),
            )
            self.histories[index] = faded.observe(outcome)

    def decode_alone(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.seconds += num_tokens / self.world.alone_rate + self.world.prices.round_s
        self.histories = [history.fade(num_tokens) for history in self.histories]


REGIMES = {
    "high acceptance": World(acceptance=(0.9,), reply_s=(0.002,)),
    "low acceptance": World(acceptance=(0.1,), reply_s=(0.002,)),
    "middling acceptance": World(acceptance=(0.6,), reply_s=(0.002,)),
    "four drafters": World(acceptance=(0.7, 0.6, 0.5, 0.3), reply_s=(0.002,) * 4),
    "four drafters that agree": World(acceptance=(0.7,) * 4, reply_s=(0.002,) * 4, shared=1.0),
    "one of four is good": World(acceptance=(0.1, 0.1, 0.9, 0.1), reply_s=(0.002,) * 4),
    "dear nodes": World(
        acceptance=(0.6, 0.6), reply_s=(0.002,) * 2, prices=replace(PRICES, node_s=0.006)
    ),
    "dear round trips": World(
        acceptance=(0.6,), reply_s=(0.002,), prices=replace(PRICES, round_s=0.04)
    ),
    "full passes": World(
        acceptance=(0.5, 0.5), reply_s=(0.002,) * 2, prices=replace(PRICES, node_s=0.016)
    ),
    "5 ms away": World(acceptance=(0.7, 0.7), reply_s=(0.005,) * 2),
    "20 ms away": World(acceptance=(0.7, 0.7), reply_s=(0.02,) * 2),
    "80 ms away": World(acceptance=(0.7, 0.7), reply_s=(0.08,) * 2),
    "one near, one far": World(acceptance=(0.6, 0.8), reply_s=(0.002, 0.08)),
}


@pytest.mark.parametrize("name", REGIMES)
def test_learned_shape_comes_close_to_the_best_fixed_one(name: str) -> None:
    world = REGIMES[name]
    player = Player(world)
    player.play(200)
    assert player.play(4000) >= 0.9 * world.find_best_rate()


@pytest.mark.parametrize("name", REGIMES)
def test_drafting_never_costs_much_against_none(name: str) -> None:
    world = REGIMES[name]
    rates = [Player(world, seed).play(64) for seed in range(30)]
    assert sum(rates) / len(rates) >= 0.93 * world.alone_rate, "short answers, learning included"
    assert Player(world).play(4000) >= 0.95 * world.alone_rate


def get_mean_gamma(world: World) -> float:
    player = Player(world)
    player.play(2000)
    gammas = [max((ask.gamma for ask in plan.asks.values()), default=0) for plan in player.plans]
    return sum(gammas) / len(gammas)


def test_shape_shrinks_with_less_acceptance_and_with_every_cost() -> None:
    usual = World(acceptance=(0.8, 0.8), reply_s=(0.002, 0.002))
    less = [
        replace(usual, acceptance=(0.4, 0.4)),
        replace(usual, prices=replace(PRICES, node_s=0.008)),
        replace(usual, reply_s=(0.12, 0.12)),
    ]
    assert get_mean_gamma(usual) > 3
    for world in less:
        assert get_mean_gamma(world) < 0.7 * get_mean_gamma(usual)


def history_of(acceptance: float, rounds: int = 200) -> AcceptanceHistory:
    """The history of a drafter whose tokens are accepted so often."""
    rng = random.Random(4)
    history = AcceptanceHistory.begin()
    for _ in range(rounds):
        accepted = next((depth for depth in range(8) if rng.random() > acceptance), 8)
        history = history.observe(
            RoundOutcome(gamma=8, accepted_by_rank=(accepted,), nodes_by_rank=(8,))
        )
    return history


def plan(*histories: AcceptanceHistory, **prices: float) -> RoundPlan:
    drafters = [DrafterOutlook(index=idx, history=one) for idx, one in enumerate(histories)]
    return plan_round(drafters, JointHistory(), replace(PRICES, **prices))


def count_asked(planned: RoundPlan) -> int:
    return sum(ask.gamma for ask in planned.asks.values())


def test_drafting_is_turned_down_as_a_pass_fills_up_and_ends_when_it_is_full() -> None:
    histories = [history_of(0.7), history_of(0.7)]
    asked = [
        count_asked(plan(*histories, plain_s=PLAIN_S + 0.001 * size, node_s=0.001 * size))
        for size in (1, 4, 16, 64, 256)
    ]
    assert asked == sorted(asked, reverse=True)
    assert asked[0] > 4
    assert asked[-1] == 0


def test_price_of_a_node_rises_with_its_cost() -> None:
    prices = [plan(history_of(0.8), node_s=node_s).min_probability for node_s in (0, 0.001, 0.01)]
    assert prices == sorted(prices)
    assert 0 < prices[0] < prices[-1] < 1


def test_disagreeing_drafters_are_asked_for_less() -> None:
    histories = [history_of(0.75), history_of(0.75)]
    drafters = [DrafterOutlook(index=idx, history=one) for idx, one in enumerate(histories)]
    prices = replace(PRICES, node_s=0.004)
    agreeing = plan_round(drafters, JointHistory(nodes=50, proposed=100), prices)
    disagreeing = plan_round(drafters, JointHistory(nodes=100, proposed=100), prices)
    assert count_asked(disagreeing) <= count_asked(agreeing)
    assert disagreeing.tokens_per_s < agreeing.tokens_per_s


def test_slow_drafter_is_left_out_where_its_wait_is_dearer_than_its_help() -> None:
    near = DrafterOutlook(index=0, history=history_of(0.8), reply_s=0.002)
    far = DrafterOutlook(index=1, history=history_of(0.85), reply_s=0.2)
    assert list(plan_round([near, far], JointHistory(), PRICES).asks) == [0]
    assert set(plan_round([near, replace(far, reply_s=0.002)], JointHistory(), PRICES).asks) >= {1}


def test_slow_draft_model_is_asked_for_shorter_branches() -> None:
    quick = DrafterOutlook(index=0, history=history_of(0.8), token_s=0.0)
    slow = replace(quick, token_s=0.012)
    lengths = [plan_round([one], JointHistory(), PRICES).asks for one in (quick, slow)]
    assert lengths[0][0].gamma > max((ask.gamma for ask in lengths[1].values()), default=0)


def test_useless_forks_are_dropped_and_useful_ones_kept() -> None:
    def fork(gained: int) -> AcceptanceHistory:
        history = AcceptanceHistory.begin()
        for idx in range(40):
            history = history.observe(
                RoundOutcome(
                    gamma=4,
                    accepted_by_rank=(idx % 2, max(idx % 2, gained)),
                    nodes_by_rank=(4, 3),
                )
            )
        return history

    assert plan(fork(0), node_s=0.001).asks[0].num_branches == 1
    assert plan(fork(3), node_s=0.001).asks[0].num_branches >= 2


def test_nothing_is_asked_where_nothing_may_be() -> None:
    drafter = DrafterOutlook(index=0, history=history_of(0.8))
    assert not plan_round([drafter], JointHistory(), PRICES, max_gamma=0).asks
    assert not plan_round([], JointHistory(), PRICES).asks
    assert not plan_probe([drafter], PRICES, max_gamma=0).asks


def test_pauses_double_up_to_a_limit_and_success_resets_them() -> None:
    joint = JointHistory()
    pauses = []
    for _ in range(7):
        pauses.append(joint.pause)
        joint = joint.after_probe(succeeded=False)
    assert pauses == [FIRST_PAUSE << min(idx, 4) for idx in range(7)]
    assert joint.pause == LONGEST_PAUSE
    assert joint.after_probe(succeeded=True).pause == FIRST_PAUSE


def test_dear_probes_are_made_seldom() -> None:
    near = DrafterOutlook(index=0, history=history_of(0.8), reply_s=0.002)
    far = replace(near, reply_s=0.08)
    assert choose_pause([near], JointHistory(), PRICES) == FIRST_PAUSE
    assert choose_pause([far], JointHistory(), PRICES) > 5 * FIRST_PAUSE


@given(
    survivals=st.lists(
        st.lists(st.floats(0, 1), min_size=1, max_size=5).map(lambda one: sorted(one)[::-1]),
        min_size=1,
        max_size=4,
    ),
    independence=st.floats(0, 1),
)
def test_several_drafters_do_no_worse_than_the_best_and_no_better_than_their_sum(
    survivals: list[list[float]], independence: float
) -> None:
    combined = combine_survival(survivals, independence)
    for depth, value in enumerate(combined):
        here = [one[depth] for one in survivals if len(one) > depth]
        assert max(here) - 1e-9 <= value <= min(1.0, sum(here)) + 1e-9


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_combined_survival_agrees_with_simulation_once_independence_is_learned(
    shared: float,
) -> None:
    world = World(acceptance=(0.7, 0.6, 0.5), reply_s=(0.0,) * 3, shared=shared)
    player = Player(world, seed=5)
    gammas = dict.fromkeys(range(3), 4)
    for _ in range(300):
        player.verify(gammas, is_probe=False)
    true = [[one**depth for depth in range(1, 5)] for one in world.acceptance]
    learned, rounds = [], 400
    for _ in range(rounds):
        player.verify(gammas, is_probe=False)
        learned.append(sum(combine_survival(true, player.joint.independence)))
    rng = random.Random(9)
    simulated = sum(max(world.draw(rng, gammas).values()) for _ in range(4000)) / 4000
    assert sum(learned) / rounds == pytest.approx(simulated, rel=0.1)


def test_joint_history_survives_being_written_down() -> None:
    joint = JointHistory().observe([[0.5], [0.4]], [0, 1], num_nodes=3, own=4)
    assert JointHistory.from_dict(joint.to_dict()) == joint


@pytest.mark.parametrize("change", [{"pause": 0.0}, {"nodes": -1.0}, {"gained": float("nan")}])
def test_joint_history_that_makes_no_sense_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not a joint history"):
        JointHistory.from_dict({**JointHistory().to_dict(), **change})
    with pytest.raises(ValueError, match="not a joint history"):
        JointHistory.from_dict({})
