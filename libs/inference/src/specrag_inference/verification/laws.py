"""Where a walk gets the target's processed law at a node from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class TargetLaws(Protocol):
    """The target's law after all processors, asked for only at nodes the walk visits."""

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Return the law of the token that follows a node.

        Args:
            node_idx: a node of the tree, or ``ROOT`` for the last committed token.
            path: token ids from the first level down to the node; empty at ``ROOT``.

        Returns:
            [vocab_size] float32 or float64, non-negative, sums to 1. The walk does not mutate it.
        """
        ...
