"""Packed numeric arrays: little-endian int32 and float32, as all arrays travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from specrag_common.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from specrag_common.speculation.proposals import TokenIds

_INT32: Final = np.dtype("<i4")
_FLOAT32: Final = np.dtype("<f4")


def encode_int32(values: Sequence[int] | NDArray[np.integer]) -> bytes:
    """Pack integers that fit 32 bits."""
    return np.asarray(values, dtype=_INT32).tobytes()


def encode_float32(values: Sequence[float] | NDArray[np.floating]) -> bytes:
    """Pack floats; float32 input survives bit for bit."""
    return np.asarray(values, dtype=_FLOAT32).tobytes()


def decode_int32(data: bytes, field: str) -> NDArray[np.int32]:
    """Unpack int32 values; the result is a read-only view of ``data``.

    Raises:
        InvalidRequest: the length is no multiple of 4.
    """
    _check_length(data, field)
    return np.frombuffer(data, dtype=_INT32)


def decode_float32(data: bytes, field: str) -> NDArray[np.float32]:
    """Unpack finite float32 values; the result is a read-only view of ``data``.

    Raises:
        InvalidRequest: the length is no multiple of 4, or a value is NaN or infinite.
    """
    _check_length(data, field)
    values = np.frombuffer(data, dtype=_FLOAT32)
    if not np.isfinite(values).all():
        bad = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InvalidRequest(field, f"value {values[bad]} at index {bad} is not finite")
    return values


def decode_token_ids(data: bytes, field: str, *, vocab_size: int) -> TokenIds:
    """Unpack token ids and hold them against the vocabulary.

    Raises:
        InvalidRequest: bad length, or an id outside 0 to ``vocab_size`` - 1.
    """
    token_ids = decode_int32(data, field)
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if outside.size:
        bad = int(outside[0])
        raise InvalidRequest(
            field, f"token id {token_ids[bad]} at index {bad} is outside 0 to {vocab_size - 1}"
        )
    return token_ids


def _check_length(data: bytes, field: str) -> None:
    if len(data) % 4:
        raise InvalidRequest(field, f"length {len(data)} bytes is no multiple of 4")
