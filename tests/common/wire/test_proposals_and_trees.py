from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from specrag.v1 import drafter_pb2, verifier_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftLaw,
    DraftProposal,
    DraftSource,
    SiblingKind,
)
from specrag_common.speculation.token_tree import NodeProposal, TokenTree
from specrag_common.wire.arrays import encode_float32, encode_int32
from specrag_common.wire.laws import decode_law, encode_law
from specrag_common.wire.proposals import decode_proposal, encode_proposal
from specrag_common.wire.rounds import RoundKey
from specrag_common.wire.trees import decode_tree, encode_tree

VOCAB_SIZE = 10
KEY = RoundKey(answer_id="a", round=2, drafter_index=1, committed_length=4, prefix_hash=9)


def law(*pairs: tuple[int, float]) -> DraftLaw:
    ids, probs = zip(*pairs, strict=True)
    return DraftLaw(token_ids=np.array(ids, np.int32), probs=np.array(probs, np.float32))


def proposal() -> DraftProposal:
    return DraftProposal(
        drafter_index=1,
        committed_length=4,
        branches=(
            DraftBranch(token_ids=(3, 4), laws=(None, None), source=DraftSource.SUFFIX),
            DraftBranch(
                token_ids=(3, 5),
                laws=(law((3, 0.25), (4, 0.75)), law((5, 1.0))),
                source=DraftSource.MODEL,
            ),
        ),
        sibling_kind=SiblingKind.WITHOUT_REPLACEMENT,
    )


def tree() -> TokenTree:
    return TokenTree(
        token_ids=np.array([3, 4, 5], np.int32),
        parent_idx=np.array([-1, 0, 0], np.int32),
        proposals=tuple(
            NodeProposal(
                node_idx=node,
                drafter_index=drafter,
                branch_idx=branch,
                law=node_law,
                sibling_kind=SiblingKind.IID,
            )
            for node, drafter, branch, node_law in [
                (0, 0, 0, None),
                (0, 1, 3, law((3, 0.5), (7, 0.5))),
                (1, 0, 0, None),
                (2, 1, 3, law((5, 1.0))),
            ]
        ),
    )


def test_proposal_survives_the_round_trip_with_laws_bit_for_bit() -> None:
    original = proposal()

    decoded = decode_proposal(
        encode_proposal(KEY, original, draft_time_us=12), vocab_size=VOCAB_SIZE
    )

    assert (decoded.key, decoded.draft_time_us) == (KEY, 12)
    assert decoded.proposal.sibling_kind is SiblingKind.WITHOUT_REPLACEMENT
    assert [b.token_ids for b in decoded.proposal.branches] == [(3, 4), (3, 5)]
    assert [b.source for b in decoded.proposal.branches] == [DraftSource.SUFFIX, DraftSource.MODEL]
    assert decoded.proposal.branches[0].laws == (None, None)
    sent, received = original.branches[1].laws[0], decoded.proposal.branches[1].laws[0]
    assert sent is not None
    assert received is not None
    assert sent.probs.tobytes() == received.probs.tobytes()
    assert sent.token_ids.tobytes() == received.token_ids.tobytes()


def test_gamma_asked_for_is_kept_and_bounds_the_branches() -> None:
    message = encode_proposal(KEY, proposal(), draft_time_us=1)

    decoded = decode_proposal(message, vocab_size=VOCAB_SIZE, gamma=2)

    assert decoded.proposal.gamma == 2
    with pytest.raises(InvalidRequest, match="2 tokens, need 1 to 1"):
        decode_proposal(message, vocab_size=VOCAB_SIZE, gamma=1)


def test_tree_survives_the_round_trip() -> None:
    decoded = decode_tree(encode_tree(tree()), vocab_size=VOCAB_SIZE)

    assert decoded.token_ids.tolist() == [3, 4, 5]
    assert decoded.parent_idx.tolist() == [-1, 0, 0]
    assert [
        (p.node_idx, p.drafter_index, p.branch_idx, p.law is None) for p in decoded.proposals
    ] == [(0, 0, 0, True), (0, 1, 3, False), (1, 0, 0, True), (2, 1, 3, False)]


def test_tree_without_nodes_is_legal() -> None:
    assert decode_tree(verifier_pb2.TokenTree(), vocab_size=VOCAB_SIZE).num_nodes == 0


def test_law_of_zero_probability_entries_loses_them() -> None:
    decoded = decode_law(encode_law(law((1, 0.0), (2, 1.0))), "law", vocab_size=VOCAB_SIZE)

    assert decoded is not None
    assert decoded.token_ids.tolist() == [2]


@pytest.mark.parametrize(
    ("ids", "probs", "fault"),
    [
        ([1, 2], [1.0], "1 probabilities for 2 token_ids"),
        ([2, 1], [0.5, 0.5], "not ascending"),
        ([1, 1], [0.5, 0.5], "not ascending"),
        ([1, 10], [0.5, 0.5], "outside 0 to 9"),
        ([1, 2], [1.5, -0.5], "negative"),
        ([1, 2], [0.5, 0.498], "differs from 1"),
        ([1, 2], [0.5, float("nan")], "not finite"),
        ([1, 2], [], "0 probabilities"),
    ],
)
def test_decode_law_refuses(ids: list[int], probs: list[float], fault: str) -> None:
    message = drafter_pb2.DraftLaw(token_ids=encode_int32(ids), probs=encode_float32(probs))

    with pytest.raises(InvalidRequest, match=fault):
        decode_law(message, "law", vocab_size=VOCAB_SIZE)


def test_law_that_sums_to_1_within_the_tolerance_is_kept() -> None:
    decoded = decode_law(encode_law(law((1, 0.5), (2, 0.4995))), "law", vocab_size=VOCAB_SIZE)

    assert decoded is not None
    assert float(decoded.probs[1]) == pytest.approx(0.4995)


Breakage = Callable[[drafter_pb2.TokenProposal], object]


@pytest.mark.parametrize(
    ("field", "breakage"),
    [
        ("proposal.branches[0].token_ids", lambda m: setattr(m.branches[0], "token_ids", b"")),
        (
            "proposal.branches[0].token_ids",
            lambda m: setattr(m.branches[0], "token_ids", encode_int32([1] * 65)),
        ),
        ("proposal.branches[1].laws", lambda m: m.branches[1].laws.pop()),
        ("proposal.branches[0].source", lambda m: setattr(m.branches[0], "source", 0)),
        ("proposal.sibling_kind", lambda m: setattr(m, "sibling_kind", 9)),
        ("proposal.draft_time_us", lambda m: setattr(m, "draft_time_us", -1)),
        ("proposal.key.round", lambda m: setattr(m.key, "round", -1)),
        ("proposal.branches", lambda m: m.branches.extend([m.branches[0]] * 16)),
    ],
)
def test_decode_proposal_names_the_bad_field(field: str, breakage: Breakage) -> None:
    message = encode_proposal(KEY, proposal(), draft_time_us=1)
    breakage(message)

    with pytest.raises(InvalidRequest) as caught:
        decode_proposal(message, vocab_size=VOCAB_SIZE)

    assert [violation.field for violation in caught.value.violations] == [field]


TreeBreakage = Callable[[verifier_pb2.TokenTree], object]


@pytest.mark.parametrize(
    ("field", "breakage"),
    [
        ("tree.token_ids", lambda m: setattr(m, "token_ids", encode_int32([3, 4, 10]))),
        ("tree.token_ids", lambda m: setattr(m, "token_ids", encode_int32([3, 4, 4]))),
        ("tree.token_ids", lambda m: setattr(m, "token_ids", b"\0" * 4 * 257)),
        ("tree.parent_idx", lambda m: setattr(m, "parent_idx", encode_int32([-1, 0]))),
        ("tree.parent_idx", lambda m: setattr(m, "parent_idx", encode_int32([-1, 1, 0]))),
        ("tree.parent_idx", lambda m: setattr(m, "parent_idx", encode_int32([-1, 2, 0]))),
        ("tree.parent_idx", lambda m: setattr(m, "parent_idx", encode_int32([-2, 0, 0]))),
        ("tree.proposals", lambda m: m.proposals.pop()),
        ("tree.proposals[0].node_idx", lambda m: setattr(m.proposals[0], "node_idx", 3)),
        ("tree.proposals[0].node_idx", lambda m: setattr(m.proposals[0], "node_idx", -1)),
        ("tree.proposals[1].branch_idx", lambda m: setattr(m.proposals[1], "branch_idx", -1)),
        (
            "tree.proposals[1].drafter_index",
            lambda m: setattr(m.proposals[1], "drafter_index", 64),
        ),
        ("tree.proposals[2].sibling_kind", lambda m: setattr(m.proposals[2], "sibling_kind", 7)),
        (
            "tree.proposals[1].law.probs",
            lambda m: setattr(m.proposals[1].law, "probs", encode_float32([0.9, 0.9])),
        ),
    ],
)
def test_decode_tree_names_the_bad_field(field: str, breakage: TreeBreakage) -> None:
    message = encode_tree(tree())
    breakage(message)

    with pytest.raises(InvalidRequest) as caught:
        decode_tree(message, vocab_size=VOCAB_SIZE)

    assert [violation.field for violation in caught.value.violations] == [field]
