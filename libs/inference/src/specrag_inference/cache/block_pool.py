"""Which blocks are in use, which are reusable as prefixes, and which are handed out next.

A block is *live* (``ref_count`` > 0), *cached* (free, but its content is known by its prefix hash
and can be taken up again) or *blank* (free, content worthless). Allocation prefers consecutive
blocks, because a sequence whose blocks follow each other is read as a view instead of a copy.
Among the places that fit it takes the one whose cached blocks were used longest ago.

Owned by one thread. The pool knows nothing of tensors; copying is the caller's.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free."""


def compute_root_hash(*, cache_scope: bytes, model_fingerprint: str) -> bytes:
    """Return the hash every chain of one scope and model starts from."""
    digest = hashlib.sha256(b"specrag-kv-v1")
    for part in (cache_scope, model_fingerprint.encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def extend_hash_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Return one chained SHA-256 for every whole block of ``token_ids`` after ``parent``."""
    raw = np.asarray(token_ids, dtype="<i4").tobytes()
    stride = 4 * block_size
    hashes = []
    for start in range(0, len(raw) - stride + 1, stride):
        parent = hashlib.sha256(parent + raw[start : start + stride]).digest()
        hashes.append(parent)
    return hashes


class BlockPool:
    """Hands out blocks, counts references and remembers prefixes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._last_used = np.zeros(num_blocks, dtype=np.int64)
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached = np.zeros(num_blocks, dtype=np.bool_)
        self._by_hash: dict[bytes, int] = {}
        self._num_free = num_blocks
        self._tick = 0

    @property
    def num_free(self) -> int:
        """Blocks nobody refers to, cached ones included."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can be taken up as a prefix."""
        return int(np.count_nonzero(self._cached & (self._ref_counts == 0)))

    def ref_count(self, block_id: int) -> int:
        """Return how many block tables refer to the block."""
        return int(self._ref_counts[block_id])

    def allocate(
        self, num_blocks: int, *, after: int | None = None, headroom: int = 0
    ) -> list[int]:
        """Take ``num_blocks`` free blocks with one reference each.

        Args:
            num_blocks: how many.
            after: the caller's last block; the blank blocks right behind it are taken first.
            headroom: blocks the caller may grow by; kept clear behind the new run if possible.

        Raises:
            OutOfBlocksError: fewer are free; nothing was taken.
        """
        if num_blocks > self._num_free:
            raise OutOfBlocksError(f"num_blocks={num_blocks} exceeds num_free={self._num_free}")
        taken = self._find_following(after, num_blocks)
        self._take(taken)
        if missing := num_blocks - len(taken):
            window = self._find_window(missing, headroom)
            self._take(window)
            taken = taken + window
        return taken

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block, reviving free ones."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                self._num_free -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one reference from each block; cached content stays until the block is reused.

        Blocks are given in the order of their tokens: the last of them counts as used longest ago,
        so that a prefix is forgotten from its end.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._num_free += 1
                self._tick += 1
                self._last_used[block_id] = self._tick

    def publish(self, block_id: int, block_hash: bytes) -> None:
        """Make a whole block of committed tokens findable; a known hash keeps its first block."""
        if block_hash in self._by_hash or self._hashes[block_id] is not None:
            return
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self._cached[block_id] = True

    def retract(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable because their content is about to change."""
        self._forget(block_ids)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of ``hashes``, without references."""
        blocks = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            blocks.append(block_id)
        return blocks

    def check_integrity(self, tables: Iterable[Sequence[int]] | None = None) -> None:
        """Raise ``AssertionError`` when the books disagree.

        Args:
            tables: all live block tables; their references are counted when given.
        """
        assert (self._ref_counts >= 0).all(), "negative ref_count"
        assert self._num_free == int(np.count_nonzero(self._ref_counts == 0)), "num_free is off"
        for block_id, block_hash in enumerate(self._hashes):
            assert (block_hash is not None) == bool(self._cached[block_id]), "cached flag is off"
            if block_hash is not None:
                assert self._by_hash.get(block_hash) == block_id, f"block {block_id}: hash lost"
        assert len(self._by_hash) == int(np.count_nonzero(self._cached)), "stale hash entries"
        if tables is not None:
            counted = np.zeros(self.num_blocks, dtype=np.int32)
            for table in tables:
                np.add.at(counted, np.asarray(table, dtype=np.int64), 1)
            assert (counted == self._ref_counts).all(), "references do not match the tables"

    def _find_following(self, after: int | None, num_blocks: int) -> list[int]:
        """Return up to ``num_blocks`` blank blocks directly behind ``after``."""
        if after is None:
            return []
        stop = min(after + 1 + num_blocks, self.num_blocks)
        span = slice(after + 1, stop)
        usable = (self._ref_counts[span] == 0) & ~self._cached[span]
        length = len(usable) if usable.all() else int(np.argmin(usable))
        return list(range(after + 1, after + 1 + length))

    def _find_window(self, num_blocks: int, headroom: int) -> list[int]:
        """Return free blocks, if possible consecutive and with room on both sides."""
        if num_blocks + headroom > 1:
            for margin in (headroom, 0):
                start = self._cheapest_window(num_blocks, margin)
                if start is not None:
                    self._forget(range(start, min(start + num_blocks + margin, self.num_blocks)))
                    return list(range(start, start + num_blocks))
        free = np.flatnonzero(self._ref_counts == 0)
        order = np.argsort(self._costs()[free], kind="stable")[:num_blocks]
        return sorted(free[order].tolist())

    def _cheapest_window(self, num_blocks: int, margin: int) -> int | None:
        """Return the first block of the free run that costs least, or ``None`` when none fits.

        ``margin`` blocks before and behind the run must be free too (the ends of the pool count
        as free), so that neither this sequence nor the one before it is walled in.
        """
        width = num_blocks + 2 * margin
        live = np.pad((self._ref_counts > 0).astype(np.int64), margin)
        cost = np.pad(self._costs(), margin)
        if len(live) < width:
            return None
        live_sums = np.concatenate(([0], np.cumsum(live)))
        cost_sums = np.concatenate(([0], np.cumsum(cost)))
        num_live = live_sums[width:] - live_sums[:-width]
        fits = np.flatnonzero(num_live == 0)
        if not fits.size:
            return None
        # Padded index i starts the margin, so the run itself starts at unpadded index i.
        lead = cost_sums[fits + width] - cost_sums[fits + margin]
        return int(fits[np.argmin(lead)])

    def _costs(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return what reusing each block loses: 0 when blank, more the later it was used."""
        if not self._cached.any():
            return np.zeros(self.num_blocks, dtype=np.int64)
        oldest = self._last_used[self._cached].min()
        return np.where(self._cached, self._last_used - oldest + 1, 0)

    def _take(self, block_ids: Sequence[int]) -> None:
        self._forget(block_ids)
        for block_id in block_ids:
            assert self._ref_counts[block_id] == 0, f"block {block_id} is live"
            self._ref_counts[block_id] = 1
        self._num_free -= len(block_ids)

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            block_hash = self._hashes[block_id]
            if block_hash is not None:
                del self._by_hash[block_hash]
                self._hashes[block_id] = None
                self._cached[block_id] = False
