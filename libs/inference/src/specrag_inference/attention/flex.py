"""GPU attention: one ``flex_attention`` call a layer over the whole cache, for all sequences.

Keys and values are read where they lie: the kernel gets the layer's whole memory and, for each tile
of queries, the spans of slots that hold its sequence's blocks. What of a span a query sees is
decided by a mask over numbers (:mod:`specrag_inference.attention.flex_layout`), so that windows,
trees and block tables are data and the kernel is compiled once for each shape.

A span may hold another sequence's tokens. They get weight zero, but zero times NaN is NaN, so a
value that is not finite is stored as zero and marked in its key: its own sequence still fails, no
other one does.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from specrag_inference.attention.flex_layout import (
    WORD_BITS,
    compute_block_map,
    compute_visibility,
    cut_tiles,
    round_up_to_power,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from specrag_inference.attention.backends import LayerCall
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.quantized import QuantizedStorage
    from specrag_inference.cache.storage import KvStorage

SPAN_SLOTS = 128
"""Slots read together, where the sizes of the cache allow it."""

MIN_SPAN_COLUMNS = 64
"""Spans a tile that one compiled kernel takes at least: 8,192 tokens."""

MAX_COMPILED_SHAPES = 256

_ALIGNMENT = 64
_MIN_QUERY_BLOCK = 128
_MIN_KERNEL_ROWS = 16
_MAX_KERNEL_ROWS = 64
_DECODE_TILE_LIMIT = 128
"""Tiles shorter than this run in the kernel that splits the keys over processors."""


class _Tables(NamedTuple):
    """What the kernel reads of a pass besides queries, keys and values.

    Attributes:
        block_map: [num_tiles, num_blocks] int32, logical number of each block for each segment, -1
            where it is none of its blocks.
        segment_idx: [num_tiles] int64, the row of ``block_map`` of each tile.

    The others are those of :class:`~specrag_inference.attention.flex_layout.TileVisibility`, on the
    device and with the axes the kernel wants.
    """

    block_map: torch.Tensor
    segment_idx: torch.Tensor
    visible_from: torch.Tensor
    visible_below: torch.Tensor
    node_bits: torch.Tensor
    first_node: torch.Tensor
    kv_counts: torch.Tensor
    kv_spans: torch.Tensor


class _Attend(Protocol):
    """The compiled attention of one kind of layer."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: _Tables
    ) -> torch.Tensor: ...


class FlexBackend:
    """Attention by ``flex_attention``: compiled on a GPU, in eager form on a CPU.

    Args:
        storage: the cache memory; its block size must be a power of two.
        compiles: whether the kernel is compiled; ``None`` = on a GPU only.

    Raises:
        ValueError: the block size is no power of two.
    """

    def __init__(
        self, storage: KvStorage | QuantizedStorage, *, compiles: bool | None = None
    ) -> None:
        block_size = storage.block_size
        if block_size != round_up_to_power(block_size):
            raise ValueError(f"block_size={block_size} must be a power of two for the flex backend")
        self._storage = storage
        self._device = storage.device
        self._compiles = self._device.type == "cuda" if compiles is None else compiles
        # Spans reach slots that nobody has written: they must not hold NaN.
        storage.clear()

    def prepare(self, step: StepInputs) -> FlexPass:
        """See :class:`~specrag_inference.attention.backends.AttentionBackend`."""
        return FlexPass(self._storage, step, compiles=self._compiles)


class FlexPass:
    """Attention of one pass; its tensors can be overwritten with those of a pass of equal shape."""

    def __init__(
        self, storage: KvStorage | QuantizedStorage, step: StepInputs, *, compiles: bool
    ) -> None:
        self._storage = storage
        self._view = storage.view_pass(step.segments)
        self._segments = self._view.segments
        self._device = storage.device
        self._num_slots = self._view.num_blocks * storage.block_size
        self._span_slots = _choose_span(storage.block_size, self._num_slots)
        self._compiles = compiles
        self._tiles = cut_tiles(self._segments, num_tokens=len(step.token_ids))
        self._tables: dict[int | None, _Tables] = {}
        places, numbers = compute_block_map(
            self._segments, block_size=storage.block_size, num_blocks=self._view.num_blocks
        )
        self._slots, self._token_idx, self._row_idx, segment_idx, at, number = _upload(
            [
                step.slot_ids,
                self._tiles.token_idx,
                self._tiles.row_idx,
                _pad(self._tiles.segment_idx, self._tiles.num_tiles),
                places,
                numbers,
            ],
            self._device,
        )
        self._segment_idx = segment_idx
        self._block_map = torch.full(
            (self._tiles.num_tiles, self._view.num_blocks),
            -1,
            dtype=torch.int32,
            device=self._device,
        )
        self._block_map.view(-1)[at] = number

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """See :class:`~specrag_inference.attention.backends.PreparedAttention`."""
        store_finite(self._storage, call.layer_idx, self._slots, key, value)
        keys, values = self._view.read(call.layer_idx)
        num_heads, _, head_dim = query.shape
        tiles = self._tiles
        tiled = query[:, self._token_idx].view(
            num_heads, tiles.num_tiles, tiles.tile_length, head_dim
        )
        attend = _build_attend(
            scaling=call.scaling,
            softcap=call.softcap,
            block_size=self._storage.block_size,
            span_slots=self._span_slots,
            group=num_heads // keys.shape[0],
            compiles=self._compiles,
        )
        output = attend(
            tiled.transpose(0, 1), keys[None], values[None], self._get_tables(call.window)
        )
        return output.transpose(1, 2).reshape(-1, num_heads, head_dim)[self._row_idx]

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Windows of the layers that have attended so far."""
        return tuple(self._tables)

    def get_shapes(self, windows: Iterable[int | None]) -> tuple[torch.Size, ...]:
        """Return the shapes of all tensors that layers with these windows read."""
        return tuple(tensor.shape for tensor in self._list_tensors(windows))

    def copy_from(self, other: FlexPass) -> None:
        """Overwrite what this pass's layers read with what another pass's would.

        Both have the shapes of :meth:`get_shapes` in common.
        """
        windows = self.windows
        pairs = zip(self._list_tensors(windows), other._list_tensors(windows), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def _list_tensors(self, windows: Iterable[int | None]) -> list[torch.Tensor]:
        tables = [tensor for window in windows for tensor in self._get_tables(window)[2:]]
        shared = [self._slots, self._token_idx, self._row_idx, self._segment_idx, self._block_map]
        return [*self._view.tensors, *shared, *tables]

    def _get_tables(self, window: int | None) -> _Tables:
        """Return what the kernel takes behind keys and values, built once for each window."""
        if window not in self._tables:
            visibility = compute_visibility(
                self._segments,
                self._tiles,
                window=window,
                block_size=self._storage.block_size,
                blocks_per_span=self._span_slots // self._storage.block_size,
                min_width=self._get_min_width(),
            )
            tables = _upload(
                [
                    visibility.visible_from,
                    visibility.visible_below,
                    visibility.node_bits,
                    visibility.first_node,
                    visibility.kv_counts[:, None, None],
                    visibility.kv_spans[:, None, None, :],
                ],
                self._device,
            )
            self._tables[window] = _Tables(self._block_map, self._segment_idx, *tables)
        return self._tables[window]

    def _get_min_width(self) -> int:
        num_spans = self._num_slots // self._span_slots
        # The CPU kernel wants a column for every span there is.
        return min(MIN_SPAN_COLUMNS, num_spans) if self._device.type == "cuda" else num_spans


def store_finite(
    storage: KvStorage | QuantizedStorage,
    layer_idx: int,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Write [num_kv_heads, num_tokens, head_dim], keeping values that are not finite from others.

    The mark in the key meets only queries that see it: their scores, and so their outputs, are NaN.
    """
    is_finite = torch.isfinite(value).all(dim=-1, keepdim=True)
    value = torch.where(is_finite, value, 0.0)
    key = torch.where(is_finite, key, float("nan"))
    storage.write(layer_idx, slots, key.transpose(0, 1), value.transpose(0, 1))


def pad_blocks(num_blocks: int, block_size: int) -> int:
    """Return the blocks to allocate for a pool of ``num_blocks``.

    At least one more, whose first slot belongs to no sequence, and whole spans.
    """
    blocks_per_span = max(1, SPAN_SLOTS // block_size)
    return -(-(num_blocks + 1) // blocks_per_span) * blocks_per_span


def _choose_span(block_size: int, num_slots: int) -> int:
    """Return the largest span of whole blocks, up to :data:`SPAN_SLOTS`, that divides the cache."""
    span = max(block_size, SPAN_SLOTS)
    while span > block_size and num_slots % span:
        span //= 2
    return span


def _pad(array: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.concatenate([array, np.zeros(length - len(array), dtype=array.dtype)])


def _upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return tensors on the device; they travel as one copy."""
    offsets = np.cumsum([0, *(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)])
    packed = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=device.type == "cuda")
    staging = packed.numpy()
    for array, offset in zip(arrays, offsets, strict=False):
        staging[offset : offset + array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    moved = packed.to(device, non_blocking=True)
    return [
        moved[offset : offset + array.nbytes]
        .view(torch.from_numpy(array[:0].ravel()).dtype)
        .view(array.shape)
        for array, offset in zip(arrays, offsets.tolist(), strict=False)
    ]


@functools.cache
def _build_attend(
    *,
    scaling: float,
    softcap: float | None,
    block_size: int,
    span_slots: int,
    group: int,
    compiles: bool,
) -> _Attend:
    """Return the attention of one kind of layer, with its constants built in.

    Query heads that share a key head stand beside each other in the kernel. Where their number is
    no power of two, which the kernel cannot do, they are folded into the tile instead.
    """
    folds = group != round_up_to_power(group)
    kernel_group = 1 if folds else group
    block_shift = block_size.bit_length() - 1

    def attend(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: _Tables,
    ) -> torch.Tensor:
        num_tiles, num_heads, tile_length, head_dim = query.shape
        if folds:
            query = query.reshape(num_tiles, num_heads // group, group * tile_length, head_dim)
        num_rows = query.shape[2]
        num_words = tables.node_bits.shape[2]

        def is_visible(
            tile: torch.Tensor, _head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
        ) -> torch.Tensor:
            line = row % tile_length
            logical = tables.block_map[tables.segment_idx[tile], slot >> block_shift]
            key = (logical << block_shift) + (slot & (block_size - 1))
            node = key - tables.first_node[tile]
            place = node.clamp(0, num_words * WORD_BITS - 1)
            word = tables.node_bits[tile, line, place // WORD_BITS if num_words > 1 else 0]
            is_ancestor = (node >= 0) & (((word >> (place % WORD_BITS)) & 1) == 1)
            in_chain = (key >= tables.visible_from[tile, line]) & (
                key < tables.visible_below[tile, line]
            )
            return (logical >= 0) & (in_chain | is_ancestor)

        block_mask = BlockMask.from_kv_blocks(
            tables.kv_counts,
            tables.kv_spans,
            BLOCK_SIZE=(choose_query_block(num_rows, kernel_group), span_slots),
            mask_mod=is_visible,
            seq_lengths=(num_rows, keys.shape[2]),
            compute_q_blocks=False,
        )
        output = flex_attention(
            query,
            keys,
            values,
            score_mod=None if softcap is None else _build_softcap(softcap),
            block_mask=block_mask,
            scale=scaling,
            enable_gqa=kernel_group > 1,
            kernel_options=choose_kernel(num_rows, kernel_group, head_dim, query.device),
        )
        return output.view(num_tiles, num_heads, tile_length, head_dim)

    # Typed loosely: the published signature lacks the last two arguments.
    compile_function: Any = torch.compile
    return compile_function(  # type: ignore[no-any-return]
        attend,
        backend="inductor" if compiles else "eager",
        fullgraph=True,
        dynamic=False,
        recompile_limit=MAX_COMPILED_SHAPES,
        isolate_recompiles=True,
    )


def _build_softcap(softcap: float) -> Callable[..., torch.Tensor]:
    def cap(
        score: torch.Tensor,
        _tile: torch.Tensor,
        _head: torch.Tensor,
        _row: torch.Tensor,
        _slot: torch.Tensor,
    ) -> torch.Tensor:
        return torch.tanh(score / softcap) * softcap

    return cap


def choose_query_block(num_rows: int, group: int) -> int:
    """Return the rows of one line of the block mask: all of a tile, in a multiple of any kernel."""
    return max(_MIN_QUERY_BLOCK, round_up_to_power(num_rows * group))


def choose_kernel(
    num_rows: int, group: int, head_dim: int, device: torch.device
) -> FlexKernelOptions | None:
    """Return kernel options: how many rows one processor takes in the key-splitting kernel."""
    if device.type != "cuda" or num_rows >= _DECODE_TILE_LIMIT:
        return None
    limit = _MAX_KERNEL_ROWS if head_dim <= 128 else _MAX_KERNEL_ROWS // 2
    return {"BLOCK_M": max(_MIN_KERNEL_ROWS, min(limit, round_up_to_power(num_rows * group)))}
