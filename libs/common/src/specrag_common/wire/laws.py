"""Draft laws and the way siblings were drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from specrag.v1 import drafter_pb2

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.proposals import DraftLaw, SiblingKind
from specrag_common.wire.arrays import (
    decode_float32,
    decode_token_ids,
    encode_float32,
    encode_int32,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specrag_common.speculation.proposals import TokenIds

SUM_TOLERANCE: Final = 1e-3
"""How far the probabilities of a law may sum from 1."""

_SIBLING_KINDS: Final = {
    SiblingKind.IID: drafter_pb2.SIBLING_KIND_IID,
    SiblingKind.WITHOUT_REPLACEMENT: drafter_pb2.SIBLING_KIND_WITHOUT_REPLACEMENT,
}
_SIBLING_KINDS_DECODED: Final[dict[int, SiblingKind]] = {
    drafter_pb2.SIBLING_KIND_UNSPECIFIED: SiblingKind.IID,
    **{message: kind for kind, message in _SIBLING_KINDS.items()},
}


def encode_law(law: DraftLaw | None) -> drafter_pb2.DraftLaw:
    """Return the message of ``law``; one without fields stands for a deterministic token."""
    if law is None:
        return drafter_pb2.DraftLaw()
    return drafter_pb2.DraftLaw(
        token_ids=encode_int32(law.token_ids), probs=encode_float32(law.probs)
    )


def decode_law(message: drafter_pb2.DraftLaw, field: str, *, vocab_size: int) -> DraftLaw | None:
    """Return the law of ``message``, or ``None`` for a deterministic token.

    Entries of probability 0 are no support and are left out.

    Raises:
        InvalidRequest: lengths differ, ids are out of range or not ascending, a probability is
            negative or not finite, or they do not sum to 1 within 1e-3.
    """
    if not message.token_ids and not message.probs:
        return None
    token_ids = decode_token_ids(message.token_ids, f"{field}.token_ids", vocab_size=vocab_size)
    probs = decode_float32(message.probs, f"{field}.probs")
    _check_law(token_ids, probs, field)
    support = probs > 0
    if support.all():
        return DraftLaw(token_ids=token_ids, probs=probs)
    return DraftLaw(token_ids=token_ids[support], probs=probs[support])


def _check_law(token_ids: TokenIds, probs: NDArray[np.float32], field: str) -> None:
    if len(token_ids) != len(probs):
        raise InvalidRequest(
            f"{field}.probs", f"{len(probs)} probabilities for {len(token_ids)} token_ids"
        )
    if (np.diff(token_ids) <= 0).any():
        raise InvalidRequest(f"{field}.token_ids", "ids are not ascending and distinct")
    if probs.min() < 0:
        raise InvalidRequest(f"{field}.probs", f"probability {probs.min()} is negative")
    total = float(probs.sum(dtype=np.float64))
    if abs(total - 1) > SUM_TOLERANCE:
        raise InvalidRequest(
            f"{field}.probs", f"sum {total:.6f} differs from 1 by more than {SUM_TOLERANCE}"
        )


def encode_sibling_kind(kind: SiblingKind) -> drafter_pb2.SiblingKind.ValueType:
    """Return the enum value of ``kind``."""
    return _SIBLING_KINDS[kind]


def decode_sibling_kind(value: int, field: str) -> SiblingKind:
    """Return the kind; unspecified means IID.

    Raises:
        InvalidRequest: the value is unknown.
    """
    try:
        return _SIBLING_KINDS_DECODED[value]
    except KeyError:
        raise InvalidRequest(field, f"unknown value {value}") from None
