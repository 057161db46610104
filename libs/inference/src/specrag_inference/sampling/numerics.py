"""The error of numbers that are none, and the checks that raise it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class NumericsError(ArithmeticError):
    """A NaN or an infinity where a number was due; the request fails, it never becomes a token."""


def check_finite(values: NDArray[np.floating], what: str) -> None:
    """Raise :class:`NumericsError` when ``values`` has a NaN or an infinity."""
    finite = np.isfinite(values)
    if not finite.all():
        idx = int(np.flatnonzero(~finite)[0])
        raise NumericsError(
            f"{what}: {int((~finite).sum())} of {values.size} values are not finite, "
            f"the first is {values.flat[idx]} at index {idx}"
        )
