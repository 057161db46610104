"""The blocks of one sequence: growing, sharing, compaction after acceptance, rollback.

Positions count the sequence's keys in the order they were written: committed tokens first, then the
nodes of a token tree. ``num_tokens`` positions hold committed tokens; whatever lies behind them is
scratch that the next :meth:`BlockTable.accept` or :meth:`BlockTable.trim` settles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from specrag_inference.cache.block_pool import extend_hash_chain
from specrag_inference.cache.storage import compute_slot_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.cache.block_pool import BlockPool
    from specrag_inference.cache.storage import SlotIds


class SlotCopier(Protocol):
    """Moves stored tokens between slots."""

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Copy tokens slot by slot in all layers, as if all were read before any is written."""


class BlockTable:
    """Maps the positions of one sequence to slots; owns a reference to each of its blocks."""

    def __init__(
        self,
        pool: BlockPool,
        copier: SlotCopier,
        *,
        block_size: int,
        root_hash: bytes,
        headroom_blocks: int = 0,
    ) -> None:
        self.block_ids: list[int] = []
        self.num_tokens = 0
        self._pool = pool
        self._copier = copier
        self._block_size = block_size
        self._headroom_blocks = headroom_blocks
        self._hashes: list[bytes] = []
        self._root_hash = root_hash

    @property
    def num_positions(self) -> int:
        """Positions that the held blocks can store."""
        return len(self.block_ids) * self._block_size

    def count_shared_blocks(self) -> int:
        """Return how many blocks must be copied before writing behind the committed tokens."""
        first = self.num_tokens // self._block_size
        return sum(self._pool.ref_count(block) > 1 for block in self.block_ids[first:])

    def count_missing_blocks(self, num_positions: int) -> int:
        """Return how many blocks :meth:`reserve` would take, copies of shared ones included."""
        needed = -(-num_positions // self._block_size)
        return max(0, needed - len(self.block_ids)) + self.count_shared_blocks()

    def compute_prefix_hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Return the hash of every whole block of ``token_ids``, as :meth:`adopt_prefix` wants."""
        return extend_hash_chain(self._root_hash, token_ids, self._block_size)

    def adopt_prefix(self, hashes: Sequence[bytes]) -> int:
        """Take up the cached blocks of the longest known prefix; return its length in tokens.

        Only for an empty table.
        """
        assert not self.block_ids, "a prefix can only start a table"
        blocks = self._pool.lookup(hashes)
        self._pool.acquire(blocks)
        self.block_ids = blocks
        self._hashes = list(hashes[: len(blocks)])
        self.num_tokens = len(blocks) * self._block_size
        return self.num_tokens

    def claim(
        self, hashes: Sequence[bytes], num_positions: int, *, num_spare_blocks: int
    ) -> int | None:
        """Take up a known prefix and hold blocks for the rest; return the prefix's length.

        Only for an empty table, which stays empty (``None``) when fewer than ``num_spare_blocks``
        would be left free.
        """
        num_cached = self.adopt_prefix(hashes)
        if self.count_missing_blocks(num_positions) + num_spare_blocks > self._pool.num_free:
            self.free()
            return None
        self.reserve(num_positions)
        return num_cached

    def reserve(self, num_positions: int) -> None:
        """Hold enough blocks of our own to write positions ``num_tokens`` .. ``num_positions``.

        Raises:
            OutOfBlocksError: the pool is exhausted; the table is unchanged.
        """
        needed = -(-num_positions // self._block_size)
        missing = needed - len(self.block_ids)
        first = self.num_tokens // self._block_size
        held = range(first, min(needed, len(self.block_ids)))
        shared = [index for index in held if self._pool.ref_count(self.block_ids[index]) > 1]
        copies = self._pool.allocate(len(shared)) if shared else []
        if missing > 0:
            try:
                self.block_ids += self._allocate_tail(missing)
            except Exception:
                self._pool.free(copies)
                raise
        for index, copy in zip(shared, copies, strict=True):
            self._replace_shared(index, copy)
        self._pool.retract(self.block_ids[index] for index in held)

    def slots(self, start: int, stop: int) -> SlotIds:
        """Return the slots of positions ``start`` .. ``stop``."""
        positions = np.arange(start, stop, dtype=np.int64)
        return self._slots_at(positions)

    def slot_runs(self, length: int) -> list[tuple[int, int]]:
        """Return the slot ranges that hold the first ``length`` positions, in order."""
        return compute_slot_runs(self.block_ids, self._block_size, length)

    def extend(self, num_tokens: int) -> None:
        """Count the next ``num_tokens`` written positions as committed."""
        self.num_tokens += num_tokens
        assert self.num_tokens <= self.num_positions, "committed beyond the held blocks"

    def accept(self, kept: Sequence[int]) -> None:
        """Commit scratch positions, given as offsets behind ``num_tokens``, ascending.

        Their keys and values move together behind the committed tokens; all other scratch is
        dropped and its blocks are freed.
        """
        self.compact_scratch(kept)
        self.num_tokens += len(kept)

    def compact_scratch(self, kept: Sequence[int]) -> None:
        """Move scratch positions together behind the committed tokens, without committing them.

        Positions come as offsets behind ``num_tokens``, ascending; all other scratch is dropped and
        its blocks are freed.
        """
        source = self.num_tokens + np.asarray(kept, dtype=np.int64)
        target = np.arange(self.num_tokens, self.num_tokens + len(kept), dtype=np.int64)
        moved = source != target
        if moved.any():
            self._copier.copy_slots(self._slots_at(source[moved]), self._slots_at(target[moved]))
        self._release_behind(self.num_tokens + len(kept))

    def trim(self, num_tokens: int) -> None:
        """Keep exactly the first ``num_tokens`` positions and free the blocks behind them."""
        self.num_tokens = num_tokens
        del self._hashes[num_tokens // self._block_size :]
        self._release_behind(num_tokens)

    def publish(self, token_ids: Sequence[int]) -> None:
        """Make the whole blocks of the committed tokens findable as prefixes.

        Args:
            token_ids: the sequence's tokens; at least ``num_tokens`` of them.
        """
        done = len(self._hashes)
        stop = self.num_tokens // self._block_size
        if stop <= done:
            return
        parent = self._hashes[-1] if self._hashes else self._root_hash
        fresh = token_ids[done * self._block_size : stop * self._block_size]
        self._hashes += extend_hash_chain(parent, fresh, self._block_size)
        for index in range(done, stop):
            self._pool.publish(self.block_ids[index], self._hashes[index])

    def fork(self) -> BlockTable:
        """Return a table over the same committed tokens; blocks are copied when written to."""
        twin = BlockTable(
            self._pool,
            self._copier,
            block_size=self._block_size,
            root_hash=self._root_hash,
            headroom_blocks=self._headroom_blocks,
        )
        twin.block_ids = self.block_ids[: -(-self.num_tokens // self._block_size)]
        twin.num_tokens = self.num_tokens
        twin._hashes = list(self._hashes)
        self._pool.acquire(twin.block_ids)
        return twin

    def discard(self) -> None:
        """Free all blocks and make them unfindable: their content is not to be trusted."""
        self._pool.retract(self.block_ids)
        self.free()

    def free(self) -> None:
        """Give all blocks back; the table is empty and usable again."""
        self.trim(0)

    def _release_behind(self, num_positions: int) -> None:
        """Free the blocks that hold none of the first ``num_positions``."""
        needed = -(-num_positions // self._block_size)
        dropped = self.block_ids[needed:]
        del self.block_ids[needed:]
        self._pool.free(dropped)

    def _allocate_tail(self, num_blocks: int) -> list[int]:
        after = self.block_ids[-1] if self.block_ids else None
        return self._pool.allocate(num_blocks, after=after, headroom=self._headroom_blocks)

    def _replace_shared(self, index: int, copy: int) -> None:
        """Swap the shared block at ``index`` for our own copy of it."""
        shared = self.block_ids[index]
        offsets = np.arange(self._block_size, dtype=np.int64)
        self._copier.copy_slots(
            shared * self._block_size + offsets, copy * self._block_size + offsets
        )
        self.block_ids[index] = copy
        self._pool.free([shared])

    def _slots_at(self, positions: SlotIds) -> SlotIds:
        blocks = np.asarray(self.block_ids, dtype=np.int64)
        return blocks[positions // self._block_size] * self._block_size + (
            positions % self._block_size
        )
