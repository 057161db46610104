from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.wire.arrays import (
    decode_float32,
    decode_int32,
    decode_token_ids,
    encode_float32,
    encode_int32,
)
from specrag_common.wire.rounds import (
    PrefixHash,
    RoundKey,
    decode_round_key,
    encode_round_key,
    prefix_hash,
)


def test_encode_int32_is_little_endian() -> None:
    assert encode_int32([1, 258]) == struct.pack("<ii", 1, 258)


def test_arrays_survive_the_round_trip_bit_for_bit() -> None:
    floats = np.array([0.1, 1e-38, 3.0], dtype=np.float32)

    assert decode_int32(encode_int32([0, -1, 2**31 - 1]), "f").tolist() == [0, -1, 2**31 - 1]
    assert decode_float32(encode_float32(floats), "f").tobytes() == floats.tobytes()


@pytest.mark.parametrize("data", [b"\0", b"\0" * 5, b"\0" * 7])
def test_decode_refuses_a_length_that_is_no_multiple_of_4(data: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"f.x: length {len(data)} bytes"):
        decode_int32(data, "f.x")
    with pytest.raises(InvalidRequest, match="no multiple of 4"):
        decode_float32(data, "f.x")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_decode_float32_refuses_values_that_are_not_finite(value: float) -> None:
    with pytest.raises(InvalidRequest, match="index 1 is not finite"):
        decode_float32(encode_float32([0.5, value]), "f")


@pytest.mark.parametrize("token_id", [-1, 10, 2**31 - 1])
def test_decode_token_ids_refuses_ids_outside_the_vocabulary(token_id: int) -> None:
    with pytest.raises(InvalidRequest, match=f"token id {token_id} at index 2 is outside 0 to 9"):
        decode_token_ids(encode_int32([0, 9, token_id]), "f", vocab_size=10)


def test_prefix_hash_is_the_first_8_bytes_of_sha256_over_the_ids() -> None:
    digest = hashlib.sha256(struct.pack("<iii", 5, 6, 7)).digest()

    assert prefix_hash([5, 6, 7]) == struct.unpack("<Q", digest[:8])[0]


def test_prefix_hash_step_by_step_equals_the_whole() -> None:
    running = PrefixHash([5])
    running.update([6, 7])
    running.update([])

    assert (running.value, running.length) == (prefix_hash([5, 6, 7]), 3)
    assert prefix_hash([5, 6]) != running.value


def test_round_key_survives_the_round_trip() -> None:
    key = RoundKey(
        answer_id="a", round=3, drafter_index=1, committed_length=7, prefix_hash=2**64 - 1
    )

    assert decode_round_key(encode_round_key(key)) == key


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("key.answer_id", {"answer_id": ""}),
        ("key.answer_id", {"answer_id": "x" * 129}),
        ("key.round", {"round": -1}),
        ("key.committed_length", {"committed_length": -1}),
        ("key.drafter_index", {"drafter_index": -1}),
        ("key.drafter_index", {"drafter_index": 64}),
    ],
)
def test_decode_round_key_names_the_bad_field(field: str, change: dict[str, int | str]) -> None:
    message = encode_round_key(
        RoundKey(answer_id="a", round=0, drafter_index=0, committed_length=0, prefix_hash=0)
    )
    for name, value in change.items():
        setattr(message, name, value)

    with pytest.raises(InvalidRequest) as caught:
        decode_round_key(message)

    assert [violation.field for violation in caught.value.violations] == [field]
