"""Round keys: which answer, which round, after which committed tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2

from specrag_common.runtime.errors import FieldViolation, InvalidRequest
from specrag_common.wire.arrays import encode_int32

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ANSWER_ID_CHARS: Final = 128
MAX_DRAFTERS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundKey:
    """Names a round of speculation.

    Attributes:
        answer_id: the answer.
        round: round number, from 0.
        drafter_index: the drafter's index in the request; 0 towards the verifier.
        committed_length: answer tokens committed before this round's proposals.
        prefix_hash: :func:`prefix_hash` of those tokens.
    """

    answer_id: str
    round: int
    drafter_index: int
    committed_length: int
    prefix_hash: int


class PrefixHash:
    """Running hash of the committed answer tokens.

    First 8 bytes (little-endian) of SHA-256 over the int32 ids; ``update`` costs by new tokens.
    """

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        """Start from tokens already committed."""
        self._digest = hashlib.sha256()
        self._length = 0
        self.update(token_ids)

    def update(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        self._digest.update(encode_int32(token_ids))
        self._length += len(token_ids)

    def extended(self, token_ids: Sequence[int]) -> PrefixHash:
        """Return the hash with ``token_ids`` appended; this one stays as it is."""
        other = PrefixHash()
        other._digest = self._digest.copy()
        other._length = self._length
        other.update(token_ids)
        return other

    @property
    def length(self) -> int:
        """Number of tokens hashed."""
        return self._length

    @property
    def value(self) -> int:
        """The hash of everything appended so far, an unsigned 64-bit number."""
        return int.from_bytes(self._digest.digest()[:8], "little")


def prefix_hash(token_ids: Sequence[int]) -> int:
    """Return the hash of a whole prefix; :class:`PrefixHash` does it step by step."""
    return PrefixHash(token_ids).value


def encode_round_key(key: RoundKey) -> common_pb2.RoundKey:
    """Return the message of ``key``."""
    return common_pb2.RoundKey(
        answer_id=key.answer_id,
        round=key.round,
        drafter_index=key.drafter_index,
        committed_length=key.committed_length,
        prefix_hash=key.prefix_hash,
    )


def decode_round_key(message: common_pb2.RoundKey, field: str = "key") -> RoundKey:
    """Return the key of ``message``.

    Raises:
        InvalidRequest: an id is empty or too long, or a number is negative or too large.
    """
    check_answer_id(message.answer_id, f"{field}.answer_id")
    violations = [
        FieldViolation(f"{field}.{name}", f"{value} is negative")
        for name, value in (
            ("round", message.round),
            ("committed_length", message.committed_length),
        )
        if value < 0
    ]
    if violations:
        raise InvalidRequest.of(violations)
    check_drafter_index(message.drafter_index, f"{field}.drafter_index")
    return RoundKey(
        answer_id=message.answer_id,
        round=message.round,
        drafter_index=message.drafter_index,
        committed_length=message.committed_length,
        prefix_hash=message.prefix_hash,
    )


def check_answer_id(answer_id: str, field: str) -> None:
    """Raise ``InvalidRequest`` unless the id has 1 to 128 code points."""
    if not 1 <= len(answer_id) <= MAX_ANSWER_ID_CHARS:
        raise InvalidRequest(
            field, f"length {len(answer_id)} is outside 1 to {MAX_ANSWER_ID_CHARS} code points"
        )


def check_drafter_index(drafter_index: int, field: str) -> None:
    """Raise ``InvalidRequest`` unless the index is within 0 to 63."""
    if not 0 <= drafter_index < MAX_DRAFTERS:
        raise InvalidRequest(field, f"{drafter_index} is outside 0 to {MAX_DRAFTERS - 1}")
