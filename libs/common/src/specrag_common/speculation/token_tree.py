"""The token tree: all drafters' branches merged by common prefix, ready for one target pass.

Node ``i`` holds ``token_ids[i]`` and continues node ``parent_idx[i]``; ``ROOT`` (-1) stands for the
last committed token. Parents come before children. A node keeps *every* proposal made for it:
merging a duplicate away would bias the output law.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from specrag_common.speculation.proposals import DraftLaw, SiblingKind, TokenIds

ROOT = -1
"""Parent index of the first level of nodes: the last committed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProposal:
    """One drafter's proposal of the token at one node.

    Attributes:
        node_idx: the node whose token is proposed.
        drafter_index: the drafter, as numbered in the request.
        branch_idx: draw order of the branch within the drafter's proposal.
        law: the law drawn from; ``None`` = DETERMINISTIC.
        sibling_kind: how siblings of the same drafter at this node's parent were drawn.
    """

    node_idx: int
    drafter_index: int
    branch_idx: int
    law: DraftLaw | None
    sibling_kind: SiblingKind


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A merged tree of proposed tokens.

    Attributes:
        token_ids: [num_nodes] int32.
        parent_idx: [num_nodes] int32, each < its own index, ``ROOT`` for the first level.
        proposals: every proposal, in no particular order.
    """

    token_ids: TokenIds
    parent_idx: NDArray[np.int32]
    proposals: tuple[NodeProposal, ...]

    @property
    def num_nodes(self) -> int:
        """Number of distinct nodes after merging."""
        return len(self.token_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Number of proposed tokens before merging."""
        return len(self.proposals)

    @staticmethod
    def empty() -> TokenTree:
        """Return the tree without nodes: a legal round that decodes one token."""
        none = np.empty(0, dtype=np.int32)
        return TokenTree(token_ids=none, parent_idx=none.copy(), proposals=())

    def compute_levels(self) -> NDArray[np.int32]:
        """Return [num_nodes] int32: 0 for the first level, parent's level + 1 below."""
        levels = np.zeros(self.num_nodes, dtype=np.int32)
        for node_idx, parent in enumerate(self.parent_idx):
            if parent != ROOT:
                levels[node_idx] = levels[parent] + 1
        return levels

    def compute_children(self) -> dict[int, tuple[int, ...]]:
        """Return the children of every inner node and of ``ROOT``, each tuple ascending."""
        children: dict[int, list[int]] = {ROOT: []}
        for node_idx, parent in enumerate(self.parent_idx.tolist()):
            children.setdefault(parent, []).append(node_idx)
        return {parent: tuple(nodes) for parent, nodes in children.items()}

    def compute_path(self, node_idx: int) -> tuple[int, ...]:
        """Return the node indices from the first level down to ``node_idx``; () for ``ROOT``."""
        path: list[int] = []
        while node_idx != ROOT:
            path.append(node_idx)
            node_idx = int(self.parent_idx[node_idx])
        return tuple(reversed(path))

    def permuted(self, order: Sequence[int]) -> TokenTree:
        """Return the same tree with its nodes renumbered: node ``order[i]`` becomes node ``i``.

        Raises:
            ValueError: ``order`` is no permutation of the nodes, or puts a child before its parent.
        """
        if sorted(order) != list(range(self.num_nodes)):
            raise ValueError(f"order is not a permutation of {self.num_nodes} nodes: {order}")
        new_idx = {old: idx for idx, old in enumerate(order)}
        new_idx[ROOT] = ROOT
        tree = TokenTree(
            token_ids=self.token_ids[list(order)],
            parent_idx=np.array(
                [new_idx[int(self.parent_idx[old])] for old in order], dtype=np.int32
            ),
            proposals=tuple(
                NodeProposal(
                    node_idx=new_idx[proposal.node_idx],
                    drafter_index=proposal.drafter_index,
                    branch_idx=proposal.branch_idx,
                    law=proposal.law,
                    sibling_kind=proposal.sibling_kind,
                )
                for proposal in self.proposals
            ),
        )
        tree.check_integrity()
        return tree

    def check_integrity(self) -> None:
        """Raise ``ValueError`` when the arrays do not describe a merged tree in topological order.

        Also refuses two nodes with one parent and one token, and proposals for nodes that are not
        there: what arrives from another process must pass this before it is verified.
        """
        if len(self.parent_idx) != self.num_nodes:
            raise ValueError(
                f"num_parents={len(self.parent_idx)} differs from num_nodes={self.num_nodes}"
            )
        seen: set[tuple[int, int]] = set()
        for node_idx, (parent, token_id) in enumerate(
            zip(self.parent_idx.tolist(), self.token_ids.tolist(), strict=True)
        ):
            if not ROOT <= parent < node_idx:
                raise ValueError(f"node {node_idx} has parent {parent}: parents come first")
            if token_id < 0:
                raise ValueError(f"node {node_idx} has the negative token id {token_id}")
            if (parent, token_id) in seen:
                raise ValueError(f"token {token_id} is twice a child of node {parent}")
            seen.add((parent, token_id))
        for proposal in self.proposals:
            if not 0 <= proposal.node_idx < self.num_nodes:
                raise ValueError(
                    f"a proposal names node {proposal.node_idx} of {self.num_nodes} nodes"
                )
