"""Cache memory laid out for matrix products on the CPU.

Keys lie transposed, [num_kv_heads, head_dim, num_slots] a layer, and values head by head,
[num_kv_heads, num_slots, head_dim]: both products of attention then read a sequence's slots as rows
that follow each other, and neither operand is rearranged first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.cache.storage import SlotIds

_ROW_PADDING = 32
"""Numbers behind each row of keys, so that rows do not lie a power of two apart in memory."""


class TransposedKvStorage:
    """Preallocated keys and values of all layers, addressed by slot.

    Attributes:
        block_size: slots a block.
        num_blocks: blocks.
        dtype: of what is written and read.
        device: where the memory is.
        keys: [num_layers, num_kv_heads, head_dim, num_slots].
        values: [num_layers, num_kv_heads, num_slots, head_dim].
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
        num_slots = num_blocks * block_size
        # No slot is read before it is written, and memory is mapped as it is written.
        self.keys = torch.empty(
            (num_layers, num_kv_heads, head_dim, num_slots + _ROW_PADDING),
            dtype=dtype,
            device=device,
        )[..., :num_slots]
        self.values = torch.empty(
            (num_layers, num_kv_heads, num_slots, head_dim), dtype=dtype, device=device
        )

    def write(
        self, layer_idx: int, slots: torch.Tensor | slice, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [num_kv_heads, num_tokens, head_dim] at ``slots``."""
        if isinstance(slots, slice):
            self.keys[layer_idx, :, :, slots] = keys.transpose(1, 2)
            self.values[layer_idx, :, slots] = values
        else:
            self.keys[layer_idx].index_copy_(2, slots, keys.transpose(1, 2))
            self.values[layer_idx].index_copy_(1, slots, values)

    def read(
        self, layer_idx: int, runs: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of slot ranges in order, in the layout of the memory.

        A single range is a view; several are copied together.
        """
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        if len(runs) == 1:
            start, stop = runs[0]
            return keys[:, :, start:stop], values[:, start:stop]
        return (
            torch.cat([keys[:, :, start:stop] for start, stop in runs], dim=2),
            torch.cat([values[:, start:stop] for start, stop in runs], dim=1),
        )

    def clear(self) -> None:
        """Make all memory finite."""
        self.keys.zero_()
        self.values.zero_()

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Copy whole tokens in all layers; overlapping ranges are read before being written."""
        if len(source) == 0:
            return
        origin = torch.from_numpy(source).to(self.device)
        target = torch.from_numpy(destination).to(self.device)
        self.keys.index_copy_(3, target, self.keys.index_select(3, origin))
        self.values.index_copy_(2, target, self.values.index_select(2, origin))
