"""Sampled answers through the engine follow the target's law, not the drafters'."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from specrag_common.speculation.proposals import DraftBranch, VerificationMode
from specrag_common.speculation.randomness import random_key_from_seed
from specrag_inference.engine import Engine
from specrag_inference.messages import (
    FreeSequence,
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.testing import build_random_model, build_tree, drain

if TYPE_CHECKING:
    from collections.abc import Sequence

BuildEngine = Callable[..., Engine]

NUM_ANSWERS = 200
SAMPLING = SamplingParams(temperature=1.0, top_k=4, max_tokens=8)
PROMPT = tuple(b"the law of the land")
FALSE_ALARM_BOUND = 40.0
"""Chi-square with at most 3 degrees of freedom exceeds 40 with probability below 1e-7."""


def draft(
    engine: Engine, seed: int, drafter_index: int, mode: VerificationMode
) -> tuple[DraftBranch, ...]:
    engine.submit(
        OpenSequence(
            sequence_id="draft",
            prompt_token_ids=PROMPT,
            sampling=SAMPLING,
            mode=mode,
            random_key=random_key_from_seed(seed),
            drafter_index=drafter_index,
        )
    )
    drain(engine)
    engine.submit(
        ProposeTokens(sequence_id="draft", round=0, committed_token_ids=(), gamma=2, num_branches=2)
    )
    (event,) = drain(engine)
    assert isinstance(event, TokensProposed)
    engine.submit(FreeSequence(sequence_id="draft"))
    return event.branches


def compute_chi_square(counts: Counter[int], law: dict[int, float]) -> float:
    """Return the statistic; infinite when a token has no probability."""
    if set(counts) - set(law):
        return math.inf
    total = counts.total()
    return sum((counts[x] - total * p) ** 2 / (total * p) for x, p in law.items())


def verify_first_token(
    engine: Engine,
    seed: int,
    proposals: Sequence[tuple[int, tuple[DraftBranch, ...]]],
    mode: VerificationMode,
) -> tuple[int, float]:
    engine.submit(
        OpenSequence(
            sequence_id="target",
            prompt_token_ids=PROMPT,
            sampling=SAMPLING,
            mode=mode,
            random_key=random_key_from_seed(seed),
        )
    )
    drain(engine)
    engine.submit(VerifyTree(sequence_id="target", round=0, tree=build_tree(proposals)))
    (event,) = drain(engine)
    assert isinstance(event, RoundVerified)
    engine.submit(FreeSequence(sequence_id="target"))
    return event.tokens[0].token_id, event.tokens[0].logprob


@pytest.mark.statistical
@pytest.mark.parametrize("mode", list(VerificationMode))
def test_first_token_follows_the_target_law_with_two_other_drafters(
    build_engine: BuildEngine, mode: VerificationMode
) -> None:
    """Chi-square over 200 seeds, false alarms below 1e-7; the drafts' own counts must fail it."""
    target = build_engine()
    drafters = [build_engine(build_random_model("llama", seed=seed)) for seed in (11, 12)]
    counts: Counter[int] = Counter()
    drafted: Counter[int] = Counter()
    law: dict[int, float] = {}
    for seed in range(NUM_ANSWERS):
        proposals = [
            (index, draft(engine, seed, index, mode)) for index, engine in enumerate(drafters)
        ]
        token_id, logprob = verify_first_token(target, seed, proposals, mode)
        counts[token_id] += 1
        law[token_id] = float(np.exp(logprob))
        drafted[proposals[0][1][0].token_ids[0]] += 1
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-5)
    assert compute_chi_square(counts, law) < FALSE_ALARM_BOUND
    assert compute_chi_square(drafted, law) > FALSE_ALARM_BOUND
