"""Cuts a pass into query tiles and says, as plain arrays, what each tile may see.

A *tile* is a fixed number of consecutive queries of one sequence; a sequence's last tile is filled
by repeating its last query. Tiles are the batch dimension of one ``flex_attention`` call, so their
number and length are rounded to few values: the kernel is compiled once for each.

What a query sees is three numbers and a bit set, whatever kind of token it is. Keys are counted in
the order cached, chain, nodes of the tree:

    visible(query, key) = visible_from <= key < visible_below, or the key is a node whose bit is set

A sliding window raises ``visible_from`` and clears bits of ancestors too far back, so windowed and
full layers run the same kernel on different numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.cache.storage import list_run_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from specrag_inference.attention.step import Segment

TILE_LENGTHS = (4, 16, 64, 128)
"""Queries a tile may have."""

TILE_COST = 16
"""What one more tile costs, in queries: it reads its sequence's keys once more."""

WORD_BITS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTiles:
    """The queries of a pass, tile by tile.

    Attributes:
        tile_length: queries a tile.
        num_tiles: tiles, a power of two; those behind the last sequence are empty.
        token_idx: [num_tiles * tile_length] int64, which token of the pass each query is.
        row_idx: [num_tokens] int64, in which row of ``token_idx`` each token stands.
        segment_idx: [num_used_tiles] int64, whose tile it is.
        first_query: [num_used_tiles] int64, its first query, counted in its sequence.
    """

    tile_length: int
    num_tiles: int
    token_idx: NDArray[np.int64]
    row_idx: NDArray[np.int64]
    segment_idx: NDArray[np.int64]
    first_query: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TileVisibility:
    """What the queries of all tiles see under one window.

    Attributes:
        visible_from: [num_tiles, tile_length] int32.
        visible_below: [num_tiles, tile_length] int32; 0 in empty tiles.
        node_bits: [num_tiles, tile_length, num_words] int64, bit ``i`` of word ``w`` is node
            ``64 * w + i``.
        first_node: [num_tiles] int32, the key that is node 0.
        kv_counts: [num_tiles] int32, how many entries of ``kv_spans`` count.
        kv_spans: [num_tiles, width] int32, spans of slots to read, in the order of their keys.
    """

    visible_from: NDArray[np.int32]
    visible_below: NDArray[np.int32]
    node_bits: NDArray[np.int64]
    first_node: NDArray[np.int32]
    kv_counts: NDArray[np.int32]
    kv_spans: NDArray[np.int32]


def round_up_to_power(value: int) -> int:
    """Return the smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def choose_tile_length(query_counts: Sequence[int]) -> int:
    """Return the tile length that costs least for sequences with so many queries."""
    counts = np.asarray(query_counts, dtype=np.int64)

    def compute_cost(length: int) -> int:
        num_tiles = int((-(-counts // length)).sum())
        return num_tiles * (length + TILE_COST)

    return min(TILE_LENGTHS, key=compute_cost)


def cut_tiles(segments: Sequence[Segment], *, num_tokens: int | None = None) -> QueryTiles:
    """Lay the queries of all segments out in tiles.

    Args:
        segments: the sequences of the pass.
        num_tokens: tokens of the pass, when some behind the segments' own only fill it up; they
            are in no tile.
    """
    counts = [segment.num_queries for segment in segments]
    length = choose_tile_length(counts)
    tiles_each = [-(-count // length) for count in counts]
    num_tiles = round_up_to_power(sum(tiles_each))
    token_idx = np.zeros(num_tiles * length, dtype=np.int64)
    row_idx = []
    row = token = 0
    for count, tiles in zip(counts, tiles_each, strict=True):
        span = np.minimum(np.arange(tiles * length), count - 1)
        token_idx[row : row + tiles * length] = token + span
        row_idx.append(row + np.arange(count))
        row += tiles * length
        token += count
    if num_tokens is not None:
        row_idx.append(np.zeros(num_tokens - token, dtype=np.int64))
    return QueryTiles(
        tile_length=length,
        num_tiles=num_tiles,
        token_idx=token_idx,
        row_idx=np.concatenate(row_idx),
        segment_idx=np.repeat(np.arange(len(segments)), tiles_each),
        first_query=np.concatenate([np.arange(tiles) * length for tiles in tiles_each]),
    )


def compute_block_map(
    segments: Sequence[Segment], *, block_size: int, num_blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return where a [num_segments, num_blocks] map of -1 holds which logical block number.

    Returns:
        flat indices into the map, and the number that goes there.
    """
    blocks = [list_run_blocks(segment.slot_runs, block_size) for segment in segments]
    places = [index * num_blocks + ids for index, ids in enumerate(blocks)]
    numbers = [np.arange(len(ids), dtype=np.int32) for ids in blocks]
    return np.concatenate(places), np.concatenate(numbers)


def compute_visibility(
    segments: Sequence[Segment],
    tiles: QueryTiles,
    *,
    window: int | None,
    block_size: int,
    blocks_per_span: int,
    min_width: int,
) -> TileVisibility:
    """Say what each query of each tile sees.

    Args:
        segments: the sequences of the pass.
        tiles: their queries, cut up.
        window: how many positions back a query sees, its own included; ``None`` = all.
        block_size: tokens a block.
        blocks_per_span: neighbouring blocks that are read together.
        min_width: fewest columns of ``kv_spans``.
    """
    length, num_used = tiles.tile_length, len(tiles.segment_idx)
    num_nodes = max(_count_nodes(segment) for segment in segments)
    num_words = round_up_to_power(max(1, -(-num_nodes // WORD_BITS)))
    shape = (tiles.num_tiles, length)
    visible_from = np.zeros(shape, dtype=np.int32)
    visible_below = np.zeros(shape, dtype=np.int32)
    node_bits = np.zeros((*shape, num_words), dtype=np.int64)
    first_node = np.zeros(tiles.num_tiles, dtype=np.int32)
    spans: list[NDArray[np.int64]] = []
    tile = 0
    for segment in segments:
        sight = _SegmentSight(segment, window, num_words)
        blocks = list_run_blocks(segment.slot_runs, block_size)
        for first in range(0, segment.num_queries, length):
            query = np.minimum(np.arange(first, first + length), segment.num_queries - 1)
            visible_from[tile] = sight.visible_from[query]
            visible_below[tile] = sight.visible_below[query]
            node_bits[tile] = sight.node_bits[query]
            first_node[tile] = sight.num_committed
            start, stop = sight.get_key_range(first, first + length)
            touched = blocks[start // block_size : -(-stop // block_size)]
            spans.append(_drop_repeats(touched // blocks_per_span))
            tile += 1
    assert tile == num_used, "tiles do not match the segments"
    counts, table = _stack_spans(spans, tiles.num_tiles, min_width)
    return TileVisibility(
        visible_from=visible_from,
        visible_below=visible_below,
        node_bits=node_bits,
        first_node=first_node,
        kv_counts=counts,
        kv_spans=table,
    )


class _SegmentSight:
    """What each query of one segment sees."""

    def __init__(self, segment: Segment, window: int | None, num_words: int) -> None:
        self.num_committed = segment.num_cached + segment.num_chain
        self._num_chain = segment.num_chain
        self._num_keys = segment.num_keys
        positions = segment.compute_query_positions()
        self.visible_below = np.minimum(positions + 1, self.num_committed).astype(np.int32)
        self.visible_from = np.zeros(segment.num_queries, dtype=np.int32)
        if window is not None:
            np.maximum(positions - np.int32(window - 1), 0, out=self.visible_from)
        self.node_bits = np.zeros((segment.num_queries, num_words), dtype=np.int64)
        if segment.tree is not None:
            rows, depths = segment.tree.rows, segment.tree.depths
            if window is not None:
                rows = rows & (depths[-len(rows) :, None] - depths[None, :] < window)
            self.node_bits[segment.num_chain :] = _pack_bits(rows, num_words)

    def get_key_range(self, first: int, stop: int) -> tuple[int, int]:
        """Return the range that holds all keys which queries ``first`` .. ``stop`` see."""
        start = int(self.visible_from[first:stop].min())
        num_queries = len(self.visible_below)
        if min(stop, num_queries) <= self._num_chain:
            return start, int(self.visible_below[first:stop].max())
        # With nodes: under a narrow window even all committed tokens may be out of sight.
        return min(start, self.num_committed), self._num_keys


def _count_nodes(segment: Segment) -> int:
    return 0 if segment.tree is None else len(segment.tree.depths)


def _pack_bits(rows: NDArray[np.bool_], num_words: int) -> NDArray[np.int64]:
    padded = np.zeros((len(rows), num_words * WORD_BITS), dtype=np.bool_)
    padded[:, : rows.shape[1]] = rows
    return np.packbits(padded, axis=1, bitorder="little").view("<i8")


def _drop_repeats(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each value once, where it first appears."""
    _, first = np.unique(values, return_index=True)
    return values[np.sort(first)]


def _stack_spans(
    spans: Sequence[NDArray[np.int64]], num_tiles: int, min_width: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    counts = np.zeros(num_tiles, dtype=np.int32)
    counts[: len(spans)] = [len(span) for span in spans]
    width = max(min_width, round_up_to_power(int(counts.max())))
    table = np.zeros((num_tiles, width), dtype=np.int32)
    for tile, span in enumerate(spans):
        table[tile, : len(span)] = span
    return counts, table
