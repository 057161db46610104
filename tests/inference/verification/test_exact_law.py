"""The output law is the target's, by exact enumeration of every random choice of a round.

Compared are whole answers of three tokens (the round's, then the target's own), so that dependence
between positions is tested and not only each token's law. ``python -m bench.exact_law`` prints the
whole table; what runs by default here takes fewer processors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.inference.verification.exact_cells import (
    KINDS,
    PROCESSORS,
    Dtype,
    build_round,
    build_world,
)
from tests.inference.verification.textbook_rules import TextbookBlock, TextbookTraversal
from tests.inference.verification.toy_worlds import (
    RULES,
    Rounds,
    compute_commit_law,
    compute_total_variation,
    enumerate_trees,
    use,
)
from tests.inference.verification.wrong_variants import WRONG_VARIANTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specrag_inference.verification.chooser import Chooser
    from specrag_inference.verification.rules import VerificationRule

LIMITS: dict[Dtype, float] = {np.float64: 1e-12, np.float32: 1e-6}
SMALLEST_BIAS = 1e-3


def check_cells(kind: str, processors: Sequence[str], dtypes: Iterable[Dtype]) -> None:
    """Hold every rule against the limit; node orders alternate."""
    for dtype in dtypes:
        for processor_idx, processor in enumerate(processors):
            trees = enumerate_trees(build_round(kind, processor, dtype))
            for rule_idx, rule in enumerate(RULES):
                permuted = (processor_idx + rule_idx) % 2 == 1
                round_ = build_round(kind, processor, dtype, rule=rule, permuted=permuted)
                bias = compute_total_variation(round_, trees)
                assert bias < LIMITS[dtype], (processor, rule, dtype.__name__)


@pytest.mark.parametrize("kind", list(KINDS))
def test_output_law_equals_the_targets(kind: str) -> None:
    names = list(PROCESSORS)
    first = list(KINDS).index(kind) % len(names)
    check_cells(kind, ["plain", names[first]], [np.float64])
    check_cells(kind, ["top-p"], [np.float32])


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_output_law_equals_the_targets_for_every_processor(kind: str) -> None:
    check_cells(kind, list(PROCESSORS), LIMITS)


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


@pytest.mark.parametrize(
    ("kind", "textbook", "rule"),
    [
        ("one chain", TextbookBlock, "as chosen"),
        ("one chain", TextbookTraversal, "as chosen"),
        ("one chain", TextbookBlock, "traversal"),
        ("two branches, iid", TextbookTraversal, "as chosen"),
        ("children without replacement", TextbookTraversal, "as chosen"),
        ("greedy and sampled", TextbookTraversal, "as chosen"),
    ],
)
@pytest.mark.congruence
def test_rule_decides_what_the_formulas_say(
    kind: str, textbook: Callable[[Chooser], VerificationRule], rule: str
) -> None:
    """Tree by tree, not only on average: the commits of each tree have the same probabilities."""
    fast = build_round(kind, "plain", np.float64, rule=rule)
    slow = replace(fast, make_rule=use(textbook))
    for _, tree in enumerate_trees(fast):
        laws = [compute_commit_law(round_, tree) for round_ in (fast, slow)]
        assert laws[0] == pytest.approx(laws[1], abs=1e-12)
