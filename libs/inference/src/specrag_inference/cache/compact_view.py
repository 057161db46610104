"""Copies of the blocks one pass reads, for a kernel that cannot read them as they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specrag_inference.cache.storage import compute_slot_runs, list_run_blocks

if TYPE_CHECKING:
    from specrag_inference.attention.step import Segment
    from specrag_inference.cache.quantized import QuantizedStorage

MIN_COMPACT_BLOCKS = 64
"""Blocks a compact view has at least, so that its size takes few values."""


class CompactView:
    """Copies of the blocks that the pass's sequences hold, numbered from 0.

    Attributes:
        segments: the pass's sequences; slots as in the copy.
        num_blocks: blocks of the copy, a power of two; those behind the last one in use repeat the
            first.
        tensors: [num_blocks * block_size] int64, which slot of the memory each one is.
    """

    def __init__(self, storage: QuantizedStorage, segments: tuple[Segment, ...]) -> None:
        size = storage.block_size
        blocks = [list_run_blocks(segment.slot_runs, size) for segment in segments]
        used, first = np.unique(np.concatenate(blocks), return_index=True)
        order = np.argsort(first)
        place = np.empty(len(used), dtype=np.int64)
        place[order] = np.arange(len(used))
        self.segments = tuple(
            replace(
                segment,
                slot_runs=tuple(
                    compute_slot_runs(place[np.searchsorted(used, ids)], size, segment.num_keys)
                ),
            )
            for segment, ids in zip(segments, blocks, strict=True)
        )
        self.num_blocks = max(MIN_COMPACT_BLOCKS, 1 << (len(used) - 1).bit_length())
        copied = np.full(self.num_blocks, used[order[0]], dtype=np.int64)
        copied[: len(used)] = used[order]
        slots = (copied[:, None] * size + np.arange(size)).ravel()
        self.tensors = (torch.from_numpy(slots).to(storage.device),)
        self._storage = storage

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, [num_kv_heads, num_slots, head_dim] each."""
        return self._storage.gather(layer_idx, self.tensors[0])
