"""How much is accepted: expected lengths by enumeration, and how far an optimum is away."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from specrag_inference.messages import SamplingParams

from tests.inference.verification.toy_worlds import (
    RULES,
    Draft,
    Law,
    Round,
    ToyModel,
    choose_greedy,
    draft_deterministic,
    draft_iid,
    draft_without_replacement,
    enumerate_commits,
    enumerate_trees,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DISTANCE = 0.7
"""How far a drafter's logits lie from the target's, in units of the logits' own spread."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A way of proposing whose accepted length is compared between rules."""

    build: Callable[[Sequence[ToyModel]], Sequence[Draft]]
    vocab_size: int = 3


SHAPES: dict[str, Shape] = {
    "one chain of two": Shape(
        build=lambda models: [draft_iid(models[0], 0, num_branches=1)], vocab_size=6
    ),
    "one chain of four": Shape(
        build=lambda models: [draft_iid(models[0], 0, num_branches=1, depth=4)]
    ),
    "two branches, iid": Shape(
        build=lambda models: [draft_iid(models[0], 0, num_branches=2)],
    ),
    "two branches of three, iid": Shape(
        build=lambda models: [draft_iid(models[0], 0, num_branches=2, depth=3)], vocab_size=2
    ),
    "tree without replacement": Shape(
        build=lambda models: [draft_without_replacement(models[0], 0, num_roots=2, num_children=2)],
    ),
    "two drafters": Shape(
        build=lambda models: [draft_iid(models[idx], idx, num_branches=1) for idx in range(2)],
    ),
    "two drafters and a fixed branch": Shape(
        build=lambda models: [
            *(draft_iid(models[idx], idx, num_branches=1) for idx in range(2)),
            draft_deterministic(choose_greedy(models[2]), 2),
        ],
    ),
}


@dataclass(frozen=True, kw_only=True)
class AcceptedLengths:
    """Expected accepted draft tokens of one round in one world."""

    sequential: float
    chosen: float


def build_models(
    seed: int, vocab_size: int, num_drafters: int, *, max_support: int | None = None
) -> tuple[ToyModel, list[ToyModel]]:
    """A random target, and drafters that resemble it and differ from each other."""
    params = SamplingParams(temperature=1.0)
    drafters = [
        ToyModel(
            seed=10_000 + 100 * seed + idx,
            vocab_size=vocab_size,
            params=params,
            near=(seed, DISTANCE),
            max_support=max_support,
        )
        for idx in range(num_drafters)
    ]
    return ToyModel(seed=seed, vocab_size=vocab_size, params=params), drafters


def compute_accepted_lengths(shape: Shape, seed: int) -> AcceptedLengths:
    """Expected accepted tokens under the sequential rule and under the one chosen."""
    target, drafters = build_models(seed, shape.vocab_size, 3)
    round_ = Round(target=target, drafters=shape.build(drafters))
    trees = enumerate_trees(round_)

    def compute(rule: str) -> float:
        commits = enumerate_commits(replace(round_, make_rule=RULES[rule]), trees)
        return sum(probability * (len(tokens) - 1) for probability, tokens in commits)

    return AcceptedLengths(sequential=compute("sequential"), chosen=compute("as chosen"))


def compute_sequential_acceptance(target: Law, drafts: Sequence[Law]) -> float:
    """Probability that one of the drafts' tokens is accepted at a node, tried one after another."""
    residual, miss = target, 1.0
    for draft in drafts:
        left = np.maximum(residual - draft, 0.0)
        if left.sum() <= 0.0:
            return 1.0
        miss *= float(left.sum())
        residual = left / left.sum()
    return 1.0 - miss


def compute_optimal_acceptance(target: Law, drafts: Sequence[Law]) -> float:
    """The most that any exact rule can accept of independent proposals at a node.

    1 + min over sets H of target(H) - product of draft_i(H): all proposals fall into H with that
    product, and then a token of H is all that can be accepted.
    """
    sets = np.array(list(product([0.0, 1.0], repeat=len(target))))
    inside = np.prod([sets @ draft for draft in drafts], axis=0)
    return float(1.0 + (sets @ target - inside).min())


def compute_node_laws(
    seed: int, vocab_size: int, num_drafters: int, max_support: int | None
) -> tuple[Law, list[Law]]:
    """A target's law and the drafters' laws as they ship them, dense."""
    target, drafters = build_models(seed, vocab_size, num_drafters, max_support=max_support)
    drafts: list[Law] = []
    for drafter in drafters:
        shipped = drafter.draft_law(())
        dense = np.zeros(vocab_size)
        dense[shipped.token_ids] = shipped.probs
        drafts.append(dense)
    return target.law(()), drafts
