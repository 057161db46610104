"""Drawing a token from a law with one uniform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.sampling.numerics import NumericsError

if TYPE_CHECKING:
    from numpy.typing import NDArray


_BLOCK = 512
"""Entries summed at once: a law is searched block by block first, then within one block."""


def draw(law: NDArray[np.floating], uniform: float) -> int:
    """Return the index at which the cumulative law passes ``uniform``.

    The sum runs in float64 over the very numbers given and is scaled by its own end, so entries
    that sum to 1 only nearly are normalised exactly. An entry of 0 is never drawn.

    Args:
        law: [support_size] of non-negative numbers.
        uniform: in [0, 1).

    Raises:
        NumericsError: the law has no positive mass, or a NaN.
    """
    starts = np.arange(0, len(law), _BLOCK)
    cumulative = np.cumsum(np.add.reduceat(law, starts, dtype=np.float64)) if len(law) else law
    total = float(cumulative[-1]) if len(law) else 0.0
    if not 0.0 < total < np.inf:
        raise NumericsError(f"a law of {len(law)} entries sums to {total}: nothing can be drawn")
    wanted = uniform * total
    last_idx = int(np.searchsorted(cumulative, total))
    block_idx = min(int(np.searchsorted(cumulative, wanted, side="right")), last_idx)
    start = int(starts[block_idx])
    before = float(cumulative[block_idx - 1]) if block_idx else 0.0
    return start + _draw_within(law[start : start + _BLOCK], wanted - before)


def _draw_within(block: NDArray[np.floating], wanted: float) -> int:
    """Return where the block's running sum passes ``wanted``, else its last positive entry."""
    support = np.flatnonzero(block)
    idx = int(np.searchsorted(np.cumsum(block[support], dtype=np.float64), wanted, side="right"))
    return int(support[min(idx, len(support) - 1)])
