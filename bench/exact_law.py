"""Print the exactness table: the largest total variation of every cell, and of wrong variants.

Run from the repository's root: ``python -m bench.exact_law``. Exits with 1 when a cell is above its
limit or a wrong variant is not caught.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from tests.inference.verification.exact_cells import KINDS, PROCESSORS, Dtype, build_round
from tests.inference.verification.toy_worlds import compute_total_variation
from tests.inference.verification.wrong_variants import WRONG_VARIANTS

LIMITS: dict[Dtype, float] = {np.float64: 1e-12, np.float32: 1e-6}
SMALLEST_BIAS = 1e-3


def main() -> int:
    started = time.perf_counter()
    failures = _print_cells() + _print_variants()
    print(f"\n{failures} failures, {time.perf_counter() - started:.0f} s")
    return int(failures > 0)


def _print_cells() -> int:
    """Print one line a kind: the worst of all processors and both node orders, by dtype."""
    failures = 0
    num_cells = 0
    print(f"{'proposals':44} {'float64':>10} {'float32':>10}   (limits 1e-12, 1e-6)")
    for kind in KINDS:
        worst = {}
        for dtype, limit in LIMITS.items():
            cells = [
                compute_total_variation(build_round(kind, processor, dtype, permuted=permuted))
                for processor in PROCESSORS
                for permuted in (False, True)
            ]
            num_cells += len(cells)
            worst[dtype] = max(cells)
            failures += worst[dtype] >= limit
        print(f"{kind:44} {worst[np.float64]:10.1e} {worst[np.float32]:10.1e}")
    print(f"{num_cells} cells: {len(KINDS)} kinds x {len(PROCESSORS)} processors x orders x dtypes")
    return failures


def _print_variants() -> int:
    """Print the total variation of every wrong variant."""
    failures = 0
    print(f"\n{'wrong variant':44} {'float64':>10}   (must exceed {SMALLEST_BIAS})")
    for name, build in WRONG_VARIANTS.items():
        bias = compute_total_variation(build())
        failures += bias <= SMALLEST_BIAS
        print(f"{name:44} {bias:10.4f}")
    return failures


if __name__ == "__main__":
    sys.exit(main())
