"""Tree masks from parent indices, vectorised.

A token tree comes as ``parent_idx`` (parents before children, ``ROOT`` = -1 for the first level).
Pointer doubling turns it into the ancestor mask: after step k a row holds all ancestors nearer than
``2**k``, and merging the row of the ancestor ``2**k`` above doubles the reach. The number of steps
is the logarithm of the depth; nothing loops over nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from specrag_common.speculation.token_tree import ROOT

BoolMask = NDArray[np.bool_]
Indices = NDArray[np.int32]


def check_parents(parent_idx: Indices) -> None:
    """Raise ``ValueError`` unless every parent is ``ROOT`` or comes before its child."""
    bad = np.flatnonzero((parent_idx < ROOT) | (parent_idx >= np.arange(len(parent_idx))))
    if bad.size:
        node = int(bad[0])
        raise ValueError(
            f"parent_idx[{node}]={int(parent_idx[node])} must be {ROOT} (root) or below {node}"
        )


def compute_ancestor_mask(parent_idx: Indices) -> BoolMask:
    """Return [num_nodes, num_nodes]: row i is true at node i and at every ancestor of it."""
    num_nodes = len(parent_idx)
    mask = np.eye(num_nodes, dtype=np.bool_)
    jump = parent_idx.astype(np.int64)
    while (alive := np.flatnonzero(jump >= 0)).size:
        targets = jump[alive]
        mask[alive] |= mask[targets]
        jump[alive] = jump[targets]
    return mask


def compute_depths(ancestor_mask: BoolMask) -> Indices:
    """Return [num_nodes]: 1 for children of the root, one more than the parent's for the rest."""
    depths: Indices = ancestor_mask.sum(axis=1, dtype=np.int32)
    return depths


def compute_visibility(*, num_cached: int, num_chain: int, tree_rows: BoolMask | None) -> BoolMask:
    """Return [num_queries, num_keys]: which keys each query of one sequence may see.

    Keys: cached tokens, then the chain, then all tree nodes. Queries: the chain, then the last
    ``len(tree_rows)`` nodes. Every query sees the cached tokens; chain tokens see each other
    causally; nodes see the whole chain, their ancestors and themselves.

    Args:
        num_cached: committed tokens already in the cache.
        num_chain: committed tokens computed in this pass.
        tree_rows: [num_new_nodes, num_nodes] rows of the ancestor mask; ``None`` without a tree.
    """
    num_new, num_nodes = (0, 0) if tree_rows is None else tree_rows.shape
    visible = np.ones((num_chain + num_new, num_cached + num_chain + num_nodes), dtype=np.bool_)
    visible[:num_chain, num_cached:] = False
    visible[:num_chain, num_cached : num_cached + num_chain] = np.tri(num_chain, dtype=np.bool_)
    if tree_rows is not None:
        visible[num_chain:, num_cached + num_chain :] = tree_rows
    return visible


def limit_to_window(
    visible: BoolMask, query_positions: Indices, key_positions: Indices, window: int
) -> BoolMask:
    """Return ``visible`` without keys ``window`` or more positions behind their query."""
    distance = query_positions[:, None] - key_positions[None, :]
    return visible & (distance < window)
