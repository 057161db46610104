"""What one forward pass computes: plain arrays, the same on every rank.

Tokens of all sequences lie behind each other in one row. A *segment* is one sequence's stretch of
that row: first ``num_chain`` committed tokens, then the tree nodes that are computed in this pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.attention.masks import BoolMask, compute_visibility, limit_to_window

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePart:
    """The token tree of one segment, nodes in the order of their cache positions.

    Attributes:
        depths: [num_nodes] int32, 1 for children of the last committed token.
        rows: [num_new_nodes, num_nodes] ancestor mask rows of the nodes computed in this pass,
            which are the last ones; earlier nodes are in the cache already.
    """

    depths: NDArray[np.int32]
    rows: BoolMask


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One sequence's part of a forward pass.

    Attributes:
        num_cached: committed tokens already in the cache.
        num_chain: committed tokens computed in this pass.
        tree: the token tree; ``None`` without one.
        slot_runs: slot ranges that hold all keys, in the order cached, chain, nodes.
    """

    num_cached: int
    num_chain: int
    tree: TreePart | None
    slot_runs: tuple[tuple[int, int], ...]

    @property
    def num_queries(self) -> int:
        """Tokens computed in this pass."""
        return self.num_chain + (0 if self.tree is None else len(self.tree.rows))

    @property
    def num_keys(self) -> int:
        """Keys that some query of the segment may see."""
        num_nodes = 0 if self.tree is None else len(self.tree.depths)
        return self.num_cached + self.num_chain + num_nodes

    @property
    def sees_everything(self) -> bool:
        """Whether every query sees every key, so that no mask is needed."""
        if self.tree is None:
            return self.num_chain <= 1
        return self.num_chain == 0 and bool(self.tree.rows.all())

    def compute_key_positions(self) -> NDArray[np.int32]:
        """Return [num_keys]: the position of every key in its sequence."""
        length = self.num_cached + self.num_chain
        chain = np.arange(length, dtype=np.int32)
        if self.tree is None:
            return chain
        return np.concatenate((chain, self.tree.depths + np.int32(length - 1)))

    def compute_query_positions(self) -> NDArray[np.int32]:
        """Return [num_queries]: the position of every query in its sequence."""
        return self.compute_key_positions()[self.num_keys - self.num_queries :]

    def compute_mask(self, window: int | None) -> BoolMask:
        """Return [num_queries, num_keys]; ``window`` limits how far back a query sees."""
        visible = compute_visibility(
            num_cached=self.num_cached,
            num_chain=self.num_chain,
            tree_rows=None if self.tree is None else self.tree.rows,
        )
        if window is None or self.num_keys <= window:
            return visible
        return limit_to_window(
            visible, self.compute_query_positions(), self.compute_key_positions(), window
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Everything a rank needs for one forward pass.

    Attributes:
        token_ids: [num_tokens] int64.
        position_ids: [num_tokens] int64, position of each token in its sequence.
        slot_ids: [num_tokens] int64, where its keys and values are stored.
        logit_rows: [num_logit_rows] int64, the tokens whose logits are wanted.
        segments: in the order of their tokens; their query counts sum to ``num_tokens``.
    """

    token_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    slot_ids: NDArray[np.int64]
    logit_rows: NDArray[np.int64]
    segments: tuple[Segment, ...]
