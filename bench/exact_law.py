"""Prove the verification rules by exact enumeration, and show what they accept.

Usage, from the repository's root: python -m bench.exact_law [--out FILE] [--workers N]

Prints the largest total variation of every kind of proposing over all rules, processors and node
orders, the walks of COUPLED that differ from the target alone, the wrong variants, and the expected
accepted lengths. Exits with 1 when a cell is above its limit, a variant is not caught, or a rule
accepts less than trying node by node.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from specrag_inference.verification.enumeration import EnumeratingChooser
from specrag_inference.verification.rules import WalkOptions
from specrag_inference.verification.walk import choose_rule

from bench.results import (
    BenchResult,
    ResultRow,
    at_least,
    at_most,
    describe_command,
    describe_machine,
    write_result,
)
from tests.inference.verification.acceptance import (
    SHAPES,
    AcceptedLengths,
    compute_accepted_lengths,
    compute_node_laws,
    compute_optimal_acceptance,
    compute_sequential_acceptance,
)
from tests.inference.verification.coupled_cells import compare_with_alone
from tests.inference.verification.exact_cells import KINDS, PROCESSORS, Dtype, build_round
from tests.inference.verification.toy_worlds import (
    RULES,
    compute_total_variation,
    enumerate_trees,
)
from tests.inference.verification.wrong_variants import WRONG_VARIANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Executor

    from tests.inference.verification.toy_worlds import Round

LIMITS: dict[Dtype, float] = {np.float64: 1e-12, np.float32: 1e-6}
SMALLEST_BIAS = 1e-3
NUM_SEEDS = 3
NUM_WORLDS = 30
NUM_NODES = 300


@dataclass(frozen=True, kw_only=True)
class KindReport:
    """All cells of one kind of proposing.

    Attributes:
        chosen: name of the rule chosen for it.
        num_cells: of REJECTION: rule, processor, order and dtype.
        worst: largest total variation by dtype.
        num_coupled: cells of COUPLED: processor.
        num_walks: of COUPLED, over trees and seeds.
        num_different: those whose tokens are not the target's own.
    """

    chosen: str
    num_cells: int
    worst: dict[Dtype, float]
    num_coupled: int
    num_walks: int
    num_different: int


def prove_kind(kind: str) -> KindReport:
    """Enumerate every cell of one kind: all rules, processors, dtypes, both node orders."""
    biases: dict[Dtype, list[float]] = {dtype: [] for dtype in LIMITS}
    chosen = ""
    for processor in PROCESSORS:
        for dtype in LIMITS:
            round_ = build_round(kind, processor, dtype)
            trees = enumerate_trees(round_)
            chosen = _name_chosen(round_)
            for rule, permuted in _list_variants(chosen, dtype):
                variant = build_round(kind, processor, dtype, rule=rule, permuted=permuted)
                biases[dtype].append(compute_total_variation(variant, trees))
    coupled = [compare_with_alone(kind, processor, range(NUM_SEEDS)) for processor in PROCESSORS]
    return KindReport(
        chosen=chosen,
        num_cells=sum(map(len, biases.values())),
        worst={dtype: max(values) for dtype, values in biases.items()},
        num_coupled=len(coupled),
        num_walks=sum(cell.num_walks for cell in coupled),
        num_different=sum(cell.num_different for cell in coupled),
    )


def _list_variants(chosen: str, dtype: Dtype) -> list[tuple[str, bool]]:
    """The (rule, permuted nodes) of a processor's cells; a rule that was chosen runs once."""
    orders = [False, True] if dtype is np.float64 else [True]
    others = [rule for rule in RULES if rule not in ("as chosen", chosen)]
    return [("as chosen", permuted) for permuted in orders] + [(rule, False) for rule in others]


def _name_chosen(round_: Round) -> str:
    options = WalkOptions(position=0, distrusted_drafters=round_.distrusted_drafters)
    tree = round_.draft(EnumeratingChooser())
    rule = type(choose_rule(tree, EnumeratingChooser(), options)).__name__
    return {"RejectionRule": "sequential"}.get(rule, rule.removesuffix("Rule").lower())


def measure_variant(name: str) -> float:
    """The total variation of one wrong variant."""
    return compute_total_variation(WRONG_VARIANTS[name]())


def measure_lengths(shape: str) -> list[AcceptedLengths]:
    """Expected accepted lengths of one shape in random worlds."""
    return [compute_accepted_lengths(SHAPES[shape], seed) for seed in range(NUM_WORLDS)]


def report_cells(pool: Executor) -> list[ResultRow]:
    """Print one line a kind; return the sums."""
    reports = dict(zip(KINDS, pool.map(prove_kind, KINDS), strict=True))
    print(f"{'proposals':44} {'chosen':10} {'float64':>9} {'float32':>9} {'COUPLED differs':>16}")
    for kind, report in reports.items():
        worst = " ".join(f"{report.worst[dtype]:9.1e}" for dtype in LIMITS)
        coupled = f"{report.num_different} of {report.num_walks}"
        print(f"{kind:44} {report.chosen:10} {worst} {coupled:>16}")
    found = list(reports.values())
    num_cells = sum(report.num_cells for report in found)
    num_coupled = sum(report.num_coupled for report in found)
    return [
        ResultRow(what="cells of REJECTION (rule x processor x kind x order)", value=num_cells),
        ResultRow(what="cells of COUPLED (processor x kind)", value=num_coupled),
        *(
            at_most(
                f"largest total variation, {dtype.__name__}",
                max(report.worst[dtype] for report in found),
                limit,
            )
            for dtype, limit in LIMITS.items()
        ),
        at_most(
            f"COUPLED walks that differ, of {sum(report.num_walks for report in found)}",
            sum(report.num_different for report in found),
            0,
        ),
    ]


def report_variants(pool: Executor) -> list[ResultRow]:
    """Print the total variation of every wrong variant; return how many are caught."""
    biases = dict(zip(WRONG_VARIANTS, pool.map(measure_variant, WRONG_VARIANTS), strict=True))
    print(f"\n{'wrong variant':44} {'total variation':>15}   (must exceed {SMALLEST_BIAS})")
    for name, bias in biases.items():
        print(f"{name:44} {bias:15.4f}")
    num_caught = sum(bias > SMALLEST_BIAS for bias in biases.values())
    return [at_least("wrong variants caught", num_caught, len(biases), bar_of="of them")]


def report_lengths(pool: Executor) -> list[ResultRow]:
    """Print expected accepted lengths beside the sequential rule's; return gains."""
    lengths = dict(zip(SHAPES, pool.map(measure_lengths, SHAPES), strict=True))
    print(f"\n{'accepted tokens a round':44} {'sequential':>10} {'chosen':>8} {'gain':>7}")
    rows = []
    for shape, worlds in lengths.items():
        sequential = float(np.mean([world.sequential for world in worlds]))
        chosen = float(np.mean([world.chosen for world in worlds]))
        print(f"{shape:44} {sequential:10.3f} {chosen:8.3f} {chosen / sequential - 1:+7.1%}")
        smallest = min(world.chosen - world.sequential for world in worlds)
        rows += [
            ResultRow(what=f"{shape}: gain", value=100 * (chosen / sequential - 1), unit="%"),
            at_least(f"{shape}: least gain of {NUM_WORLDS} worlds", smallest, -1e-12, "tokens"),
        ]
    return rows


def report_head_room() -> list[ResultRow]:
    """Print, for a node, what sequential trials accept beside the optimum."""
    print(f"\n{'acceptance at a node, vocabulary 6':44} {'sequential':>10} {'optimum':>8}")
    rows = []
    for max_support, num_drafters in ((None, 1), (None, 2), (None, 4), (3, 1), (3, 2), (3, 4)):
        nodes = [compute_node_laws(seed, 6, num_drafters, max_support) for seed in range(NUM_NODES)]
        reached = float(np.mean([compute_sequential_acceptance(*node) for node in nodes]))
        optimum = float(np.mean([compute_optimal_acceptance(*node) for node in nodes]))
        support = "all tokens" if max_support is None else f"{max_support} tokens"
        name = f"{num_drafters} drafters, laws of {support}"
        print(f"{name:44} {reached:10.3f} {optimum:8.3f}")
        rows.append(
            ResultRow(what=f"{name}: of the optimum", value=100 * reached / optimum, unit="%")
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    with ProcessPoolExecutor(options.workers) as pool:
        rows = report_cells(pool) + report_variants(pool) + report_lengths(pool)
    rows += report_head_room()
    result = BenchResult(
        name="exact_law",
        rows=tuple(rows),
        command=describe_command("bench.exact_law"),
        conditions=f"exact enumeration, answers of three tokens; {describe_machine()}",
    )
    if options.out is not None:
        write_result(options.out, result)
    verdict = "everything holds" if result.holds else "SOMETHING IS WRONG"
    num_cells = sum(row.value for row in rows[:2] if not isinstance(row.value, str))
    print(f"\n{num_cells:.0f} cells, {verdict}, {time.perf_counter() - started:.0f} s")
    return int(not result.holds)


if __name__ == "__main__":
    sys.exit(main())
