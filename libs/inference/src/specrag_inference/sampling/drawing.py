"""Drawing a token from a law with one uniform."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.sampling.numerics import NumericsError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    support = np.flatnonzero(law)
    cumulative = np.cumsum(law[support], dtype=np.float64)
    total = float(cumulative[-1]) if len(support) else 0.0
    if not 0.0 < total < np.inf:
        raise NumericsError(f"a law of {len(law)} entries sums to {total}: nothing can be drawn")
    idx = int(np.searchsorted(cumulative, uniform * total, side="right"))
    return int(support[min(idx, len(support) - 1)])
