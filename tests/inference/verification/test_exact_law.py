"""The output law is the target's, by exact enumeration of every random choice of a round.

Compared are whole answers of three tokens (the round's, then the target's own), so that dependence
between positions is tested and not only each token's law. ``python -m bench.exact_law`` prints the
whole table; the production dtype is tested here on fewer processors.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.inference.verification.exact_cells import (
    KINDS,
    PROCESSORS,
    Dtype,
    build_round,
    build_world,
)
from tests.inference.verification.toy_worlds import Rounds, compute_total_variation
from tests.inference.verification.wrong_variants import WRONG_VARIANTS

LIMITS: dict[Dtype, float] = {np.float64: 1e-12, np.float32: 1e-6}
SMALLEST_BIAS = 1e-3


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("kind", list(KINDS))
def test_output_law_equals_the_targets_for_every_processor(kind: str, dtype: Dtype) -> None:
    processors = list(PROCESSORS) if dtype is np.float64 else ["top-p", "greedy target"]
    for idx, processor in enumerate(processors):
        round_ = build_round(kind, processor, dtype, permuted=idx % 2 == 1)
        assert compute_total_variation(round_) < LIMITS[dtype], processor


@pytest.mark.parametrize("processor", list(PROCESSORS))
def test_node_order_does_not_change_the_output_law(processor: str) -> None:
    for permuted in (False, True):
        round_ = build_round("two drafters", processor, np.float64, permuted=permuted, seed=31)
        assert compute_total_variation(round_) < LIMITS[np.float64]


@pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("processor", ["plain", "top-p", "greedy target"])
def test_several_rounds_with_lengths_from_history_keep_the_law(
    processor: str, dtype: Dtype
) -> None:
    world = build_world(processor, dtype)
    rounds = Rounds(target=world.target, draft_models=world.drafters[:1])
    assert compute_total_variation(rounds) < LIMITS[dtype]


@pytest.mark.parametrize("variant", list(WRONG_VARIANTS))
def test_wrong_variant_is_caught(variant: str) -> None:
    assert compute_total_variation(WRONG_VARIANTS[variant]()) > SMALLEST_BIAS
