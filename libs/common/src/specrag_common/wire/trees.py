"""The merged token tree of one round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from specrag.v1 import verifier_pb2

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.token_tree import ROOT, NodeProposal, TokenTree
from specrag_common.wire.arrays import decode_int32, decode_token_ids, encode_int32
from specrag_common.wire.laws import (
    decode_law,
    decode_sibling_kind,
    encode_law,
    encode_sibling_kind,
)
from specrag_common.wire.proposals import MAX_BRANCHES
from specrag_common.wire.rounds import MAX_DRAFTERS, check_drafter_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specrag_common.speculation.proposals import TokenIds

MAX_TREE_NODES: Final = 256
"""Most nodes of one tree."""


def encode_tree(tree: TokenTree) -> verifier_pb2.TokenTree:
    """Return the message of ``tree``."""
    return verifier_pb2.TokenTree(
        token_ids=encode_int32(tree.token_ids),
        parent_idx=encode_int32(tree.parent_idx),
        proposals=[_encode_node_proposal(proposal) for proposal in tree.proposals],
    )


def decode_tree(
    message: verifier_pb2.TokenTree, *, vocab_size: int, field: str = "tree"
) -> TokenTree:
    """Return the tree of ``message``; one without nodes is legal.

    Raises:
        InvalidRequest: more than 256 nodes, arrays of different lengths, ids out of range, a
            parent not before its child, siblings with one token, a node without a proposal, or
            a malformed proposal.
    """
    token_ids = decode_token_ids(message.token_ids, f"{field}.token_ids", vocab_size=vocab_size)
    parent_idx = decode_int32(message.parent_idx, f"{field}.parent_idx")
    _check_shape(token_ids, parent_idx, field)
    num_nodes = len(token_ids)
    most = MAX_TREE_NODES * MAX_DRAFTERS
    if len(message.proposals) > most:
        raise InvalidRequest(f"{field}.proposals", f"{len(message.proposals)} exceed {most}")
    proposals = tuple(
        _decode_node_proposal(one, f"{field}.proposals[{idx}]", num_nodes, vocab_size)
        for idx, one in enumerate(message.proposals)
    )
    missing = set(range(num_nodes)) - {proposal.node_idx for proposal in proposals}
    if missing:
        raise InvalidRequest(f"{field}.proposals", f"node {min(missing)} has no proposal")
    return TokenTree(token_ids=token_ids, parent_idx=parent_idx, proposals=proposals)


def _check_shape(token_ids: TokenIds, parent_idx: NDArray[np.int32], field: str) -> None:
    num_nodes = len(token_ids)
    if num_nodes > MAX_TREE_NODES:
        raise InvalidRequest(f"{field}.token_ids", f"{num_nodes} nodes exceed {MAX_TREE_NODES}")
    if len(parent_idx) != num_nodes:
        raise InvalidRequest(
            f"{field}.parent_idx", f"{len(parent_idx)} parents for {num_nodes} nodes"
        )
    bad = np.flatnonzero((parent_idx < ROOT) | (parent_idx >= np.arange(num_nodes)))
    if bad.size:
        node = int(bad[0])
        raise InvalidRequest(
            f"{field}.parent_idx",
            f"node {node} has parent {parent_idx[node]}, need {ROOT} to {node - 1}",
        )
    children = set(zip(parent_idx.tolist(), token_ids.tolist(), strict=True))
    if len(children) != num_nodes:
        raise InvalidRequest(f"{field}.token_ids", "siblings with one token must share a node")


def _encode_node_proposal(proposal: NodeProposal) -> verifier_pb2.NodeProposal:
    return verifier_pb2.NodeProposal(
        node_idx=proposal.node_idx,
        drafter_index=proposal.drafter_index,
        branch_idx=proposal.branch_idx,
        law=None if proposal.law is None else encode_law(proposal.law),
        sibling_kind=encode_sibling_kind(proposal.sibling_kind),
    )


def _decode_node_proposal(
    message: verifier_pb2.NodeProposal, field: str, num_nodes: int, vocab_size: int
) -> NodeProposal:
    if not 0 <= message.node_idx < num_nodes:
        raise InvalidRequest(
            f"{field}.node_idx", f"{message.node_idx} is outside 0 to {num_nodes - 1}"
        )
    check_drafter_index(message.drafter_index, f"{field}.drafter_index")
    if not 0 <= message.branch_idx < MAX_BRANCHES:
        raise InvalidRequest(
            f"{field}.branch_idx", f"{message.branch_idx} is outside 0 to {MAX_BRANCHES - 1}"
        )
    return NodeProposal(
        node_idx=message.node_idx,
        drafter_index=message.drafter_index,
        branch_idx=message.branch_idx,
        law=decode_law(message.law, f"{field}.law", vocab_size=vocab_size),
        sibling_kind=decode_sibling_kind(message.sibling_kind, f"{field}.sibling_kind"),
    )
