"""Which path of a token tree to show as optimistic text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.speculation.token_tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specrag_common.speculation.token_tree import TokenTree


def choose_best_path(tree: TokenTree, acceptance: Mapping[int, float]) -> tuple[int, ...]:
    """Return the token ids from the root to a leaf that the target most likely accepts.

    At each node the child wins whose proposer was accepted most often lately; of equals the one
    with more proposers, then the one that came first. For display only: which tokens are verified
    does not depend on it.

    Args:
        tree: the merged tree.
        acceptance: recent share of accepted tokens by drafter index.
    """
    children = tree.compute_children()
    proposers: dict[int, set[int]] = {}
    for proposal in tree.proposals:
        proposers.setdefault(proposal.node_idx, set()).add(proposal.drafter_index)

    def rank(node_idx: int) -> tuple[float, int]:
        drafters = proposers[node_idx]
        return max(acceptance.get(one, 0.0) for one in drafters), len(drafters)

    path: list[int] = []
    node_idx = ROOT
    while nodes := children.get(node_idx):
        node_idx = max(nodes, key=rank)
        path.append(int(tree.token_ids[node_idx]))
    return tuple(path)
