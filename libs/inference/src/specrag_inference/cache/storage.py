"""The memory that holds keys and values, addressed by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specrag_inference.attention.step import Segment

SlotIds = NDArray[np.int64]
"""[num_tokens] int64: block id * block size + offset in the block."""


class KvStorage:
    """One preallocated tensor of keys and values for all layers.

    Layout: [num_layers, 2, num_slots, num_kv_heads, head_dim]. A token's entry is contiguous for
    each layer, so moving a token is one gather and one scatter for all layers together.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.dtype = dtype
        self.device = device
        # Memory of the CPU is left to be mapped as it is written; no slot is read before that.
        allocate = torch.empty if device.type == "cpu" else torch.zeros
        self.data = allocate(
            (num_layers, 2, num_blocks * block_size, num_kv_heads, head_dim),
            dtype=dtype,
            device=device,
        )

    def write(
        self, layer_idx: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [num_tokens, num_kv_heads, head_dim] at ``slots``."""
        self.data[layer_idx, 0].index_copy_(0, slots, keys)
        self.data[layer_idx, 1].index_copy_(0, slots, values)

    def read(
        self, layer_idx: int, runs: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [num_tokens, num_kv_heads, head_dim] of slot ranges in order.

        A single range is a view; several are copied together.
        """
        keys, values = self.data[layer_idx, 0], self.data[layer_idx, 1]
        if len(runs) == 1:
            start, stop = runs[0]
            return keys[start:stop], values[start:stop]
        return (
            torch.cat([keys[start:stop] for start, stop in runs]),
            torch.cat([values[start:stop] for start, stop in runs]),
        )

    def view_all(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of one layer's whole memory, [num_kv_heads, num_slots, head_dim] each."""
        return self.data[layer_idx, 0].transpose(0, 1), self.data[layer_idx, 1].transpose(0, 1)

    def view_pass(self, segments: tuple[Segment, ...]) -> WholeView:
        """Return what a pass over these sequences reads: the memory itself."""
        return WholeView(self, segments)

    def clear(self) -> None:
        """Make all memory finite: a kernel may read slots nobody has written."""
        self.data.zero_()

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Copy whole tokens in all layers; overlapping ranges are read before being written."""
        if len(source) == 0:
            return
        device = self.data.device
        moved = self.data.index_select(2, torch.from_numpy(source).to(device))
        self.data.index_copy_(2, torch.from_numpy(destination).to(device), moved)


class WholeView:
    """The memory itself, read where it lies.

    Attributes:
        segments: the pass's sequences; slots as in the memory.
        num_blocks: all blocks.
        tensors: what is read besides the memory.
    """

    def __init__(self, storage: KvStorage, segments: tuple[Segment, ...]) -> None:
        self.segments = segments
        self.num_blocks = storage.num_blocks
        self.tensors: tuple[torch.Tensor, ...] = ()
        self._storage = storage

    def read(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, [num_kv_heads, num_slots, head_dim] each."""
        return self._storage.view_all(layer_idx)


def list_run_blocks(runs: Iterable[tuple[int, int]], block_size: int) -> NDArray[np.int64]:
    """Return the ids of the blocks that slot ranges lie in, in order."""
    return np.concatenate(
        [np.arange(start // block_size, -(-stop // block_size)) for start, stop in runs]
    )


def compute_slot_runs(
    block_ids: Sequence[int] | NDArray[np.int64], block_size: int, length: int
) -> list[tuple[int, int]]:
    """Return the slot ranges that hold the first ``length`` tokens of a block table.

    Consecutive blocks merge into one range.
    """
    num_blocks = -(-length // block_size)
    blocks = np.asarray(block_ids[:num_blocks], dtype=np.int64)
    if not blocks.size:
        return []
    breaks = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = blocks[np.concatenate(([0], breaks))] * block_size
    ends = (blocks[np.concatenate((breaks - 1, [len(blocks) - 1]))] + 1) * block_size
    ends[-1] -= num_blocks * block_size - length
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
