"""Counter-based random numbers: every draw is a pure function of its key.

A draw is named by (random key, purpose, absolute answer position, drafter index, branch, trial).
No state is kept, so a replay, another replica or another batch order gets the same numbers, and no
uniform can serve two purposes. The generator is numpy's Philox-4x64 with key and counter set
explicitly, whose raw output numpy documents as stable.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import hashlib
import secrets
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

RANDOM_KEY_BYTES = 16
"""Length of a random key: the 128 bits of Philox's key."""

_MAX_FIELD = 2**32
_CHUNK = 8192


class Purpose(IntEnum):
    """What a uniform decides. ACCEPT and FINAL never leave the verifier."""

    DRAFT = 1
    ACCEPT = 2
    FINAL = 3
    COUPLED = 4


def new_random_key() -> bytes:
    """Return 16 fresh random bytes, for a request without a seed."""
    return secrets.token_bytes(RANDOM_KEY_BYTES)


def random_key_from_seed(seed: int) -> bytes:
    """Return the random key of a request's seed; equal seeds give equal keys everywhere.

    Any Python integer is a seed; the key is a hash, so that neighbouring seeds are unrelated.
    """
    digest = hashlib.sha256(b"specrag-seed:" + str(seed).encode()).digest()
    return digest[:RANDOM_KEY_BYTES]


class RandomStream:
    """All random numbers of one sequence, addressed by key; stateless and safe to share."""

    __slots__ = ("_key",)

    def __init__(self, random_key: bytes) -> None:
        """Bind the stream to ``random_key``.

        Raises:
            ValueError: ``random_key`` is not 16 bytes long.
        """
        if len(random_key) != RANDOM_KEY_BYTES:
            raise ValueError(
                f"random_key has {len(random_key)} bytes, expected {RANDOM_KEY_BYTES}; "
                "use random_key_from_seed() or new_random_key()"
            )
        self._key = np.frombuffer(random_key, dtype="<u8").astype(np.uint64)

    def uniform(
        self,
        purpose: Purpose,
        *,
        position: int,
        drafter_index: int = 0,
        branch_idx: int = 0,
        trial: int = 0,
    ) -> float:
        """Return the uniform in [0, 1) of one decision, with 53 random bits.

        Args:
            purpose: what is decided.
            position: absolute position in the answer of the token decided about, from 0.
            drafter_index: the drafter, as numbered in the request.
            branch_idx: draw order of the branch.
            trial: ordinal of the trial at the node.
        """
        raw = self._raw(purpose, position, 1, drafter_index, branch_idx, trial)
        return float((int(raw[0]) >> 11) * 2.0**-53)

    def gumbel(self, position: int, vocab_size: int) -> NDArray[np.float64]:
        """Return the standard Gumbel variables G(position, x) of the COUPLED mode.

        The value at x does not depend on ``vocab_size``: models whose vocabularies are padded
        differently share it.

        Returns:
            [vocab_size] float64, finite.
        """
        return _gumbel_from_raw(self._raw(Purpose.COUPLED, position, vocab_size))

    def gumbel_at(self, position: int, token_ids: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return ``gumbel(position, …)[token_ids]``, taking logarithms only where asked.

        Args:
            position: absolute answer position.
            token_ids: [num_tokens] integers >= 0, in any order.

        Returns:
            [num_tokens] float64.
        """
        if not len(token_ids):
            return np.empty(0, dtype=np.float64)
        raw = self._raw(Purpose.COUPLED, position, int(token_ids.max()) + 1)
        return _gumbel_from_raw(raw[token_ids])

    def gumbel_argmax(
        self, position: int, token_ids: NDArray[np.integer], probs: NDArray[np.floating]
    ) -> int:
        """Return the index that maximises log probs + ``gumbel_at(position, token_ids)``.

        Takes logarithms only of the few candidates left by a bound: with u the uniform behind G,
        G = -log(-log u) and -log u >= 1 - u, so no score exceeds log(probs / (1 - u)).

        Args:
            position: absolute answer position.
            token_ids: [num_tokens] integers >= 0; at least one.
            probs: [num_tokens], positive.

        Returns:
            Index into ``token_ids``; the lowest on ties.
        """
        raw = self._raw(Purpose.COUPLED, position, int(token_ids.max()) + 1)
        best_idx, best_score = 0, -np.inf
        for start in range(0, len(token_ids), _CHUNK):  # what fits the cache is not written out
            chunk = slice(start, start + _CHUNK)
            idx, score = _find_best(raw[token_ids[chunk]], probs[chunk], best_score)
            if score > best_score:
                best_idx, best_score = start + idx, score
        return best_idx

    def _raw(
        self,
        purpose: Purpose,
        position: int,
        count: int,
        drafter_index: int = 0,
        branch_idx: int = 0,
        trial: int = 0,
    ) -> NDArray[np.uint64]:
        """Return ``count`` raw 64-bit words of one key; the lowest counter word runs along them."""
        for name, value in (
            ("position", position),
            ("drafter_index", drafter_index),
            ("branch_idx", branch_idx),
            ("trial", trial),
        ):
            if not 0 <= value < _MAX_FIELD:
                raise ValueError(f"{name}={value} is outside the key's range [0, {_MAX_FIELD})")
        counter = np.array(
            [0, position, drafter_index << 32 | branch_idx, int(purpose) << 32 | trial],
            dtype=np.uint64,
        )
        words: NDArray[np.uint64] = np.random.Philox(counter=counter, key=self._key).random_raw(
            count
        )
        return words


def _find_best(
    raw: NDArray[np.uint64], probs: NDArray[np.floating], at_least: float
) -> tuple[int, float]:
    """Return the index of the best score and the score; ``-inf`` when none reaches ``at_least``."""
    bounds = probs / (1.0 - _unit_from_raw(raw))
    likely = int(np.argmax(bounds))
    if bounds[likely] < np.exp(at_least) * (1.0 - 1e-9):
        return 0, -np.inf
    score = float(probs[likely]) * np.exp(_gumbel_from_raw(raw[likely : likely + 1])[0])
    candidates = np.flatnonzero(bounds >= score * (1.0 - 1e-9))
    scores = np.log(probs[candidates].astype(np.float64)) + _gumbel_from_raw(raw[candidates])
    best = int(np.argmax(scores))
    return int(candidates[best]), float(scores[best])


def _gumbel_from_raw(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map raw words to standard Gumbel variables."""
    gumbel: NDArray[np.float64] = -np.log(-np.log(_unit_from_raw(raw)))
    return gumbel


def _unit_from_raw(raw: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Map raw words to uniforms strictly inside (0, 1): odd multiples of 2**-53, all exact."""
    unit: NDArray[np.float64] = ((raw >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return unit
