"""The tree a draft sequence grows while it proposes; most of its nodes are in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.token_tree import ROOT

from specrag_inference.attention.masks import compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import TreePart

if TYPE_CHECKING:
    from collections.abc import Sequence


class DraftTree:
    """Nodes in the order they were added; the first ``num_resident`` have keys and values cached.

    Branches with a common prefix share its nodes, so that it is computed once.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_resident = 0
        self._parent_idx: list[int] = []
        self._children: dict[tuple[int, int], int] = {}

    def add(self, parent_idx: int, token_id: int) -> int:
        """Return the child of ``parent_idx`` with this token, adding it if it is missing."""
        node_idx = self._children.get((parent_idx, token_id))
        if node_idx is None:
            node_idx = len(self.token_ids)
            self._children[parent_idx, token_id] = node_idx
            self.token_ids.append(token_id)
            self._parent_idx.append(parent_idx)
        return node_idx

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Return the cached nodes, from the first level down, that carry ``token_ids``."""
        path: list[int] = []
        node_idx = ROOT
        for token_id in token_ids:
            child = self._children.get((node_idx, token_id))
            if child is None or child >= self.num_resident:
                break
            path.append(child)
            node_idx = child
        return path

    def compute_part(self) -> TreePart:
        """Return depths of all nodes and the mask rows of those not yet cached."""
        mask = compute_ancestor_mask(np.asarray(self._parent_idx, dtype=np.int32))
        return TreePart(depths=compute_depths(mask), rows=mask[self.num_resident :])
