"""The numbers the flex kernel reads, against the segments' own masks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.attention.flex_layout import (
    TILE_LENGTHS,
    QueryTiles,
    TileVisibility,
    choose_tile_length,
    compute_block_map,
    compute_visibility,
    cut_tiles,
    round_up_to_power,
)
from specrag_inference.attention.masks import compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import Segment, TreePart
from specrag_inference.cache.storage import compute_slot_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 4
NUM_BLOCKS = 64


@st.composite
def passes(draw: st.DrawFn) -> tuple[Segment, ...]:
    """Return up to four sequences over blocks in any order; some share the first one's blocks."""
    order = draw(st.permutations(range(NUM_BLOCKS)))
    return tuple(draw(sequences(order, index)) for index in range(draw(st.integers(1, 4))))


@st.composite
def sequences(draw: st.DrawFn, order: list[int], index: int) -> Segment:
    num_cached = draw(st.integers(0, 30))
    num_nodes = draw(st.integers(0, 12))
    num_resident = draw(st.integers(0, num_nodes - 1)) if num_nodes else 0
    # Nodes stand behind the chain: cached ones mean that all of it is cached too.
    num_chain = 0 if num_resident else draw(st.integers(0 if num_nodes else 1, 22))
    tree = None
    if num_nodes:
        parents = [draw(st.integers(-1, node - 1)) for node in range(num_nodes)]
        mask = compute_ancestor_mask(np.array(parents, dtype=np.int32))
        tree = TreePart(depths=compute_depths(mask), rows=mask[num_resident:])
    num_shared = num_cached // BLOCK_SIZE if draw(st.booleans()) else 0
    blocks = order[:num_shared] + order[16 * index + num_shared : 16 * index + 16]
    length = num_cached + num_chain + num_nodes
    return Segment(
        num_cached=num_cached,
        num_chain=num_chain,
        tree=tree,
        slot_runs=tuple(compute_slot_runs(blocks, BLOCK_SIZE, length)),
    )


def read_row(
    segments: tuple[Segment, ...],
    tiles: QueryTiles,
    seen: TileVisibility,
    row: int,
    *,
    blocks_per_span: int,
) -> NDArray[np.bool_]:
    """Return [num_slots]: what the kernel lets a query see, by its formula and its spans."""
    tile, line = divmod(row, tiles.tile_length)
    places, numbers = compute_block_map(segments, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    block_map = np.full((len(segments), NUM_BLOCKS), -1)
    block_map.ravel()[places] = numbers
    slots = np.arange(NUM_BLOCKS * BLOCK_SIZE)
    logical = block_map[tiles.segment_idx[tile], slots // BLOCK_SIZE]
    key = logical * BLOCK_SIZE + slots % BLOCK_SIZE
    node = key - seen.first_node[tile]
    words = seen.node_bits[tile, line]
    place = np.clip(node, 0, 64 * len(words) - 1)
    has_bit = (words[place // 64] >> (place % 64)) & 1 == 1
    visible: NDArray[np.bool_] = (
        (key >= seen.visible_from[tile, line]) & (key < seen.visible_below[tile, line])
    ) | ((node >= 0) & has_bit)
    spans = seen.kv_spans[tile, : seen.kv_counts[tile]]
    assert len(set(spans.tolist())) == len(spans), "a span read twice counts twice"
    is_read = np.isin(slots // (BLOCK_SIZE * blocks_per_span), spans)
    seen_and_read: NDArray[np.bool_] = visible & (logical >= 0) & is_read
    return seen_and_read


@given(
    segments=passes(),
    window=st.one_of(st.none(), st.integers(1, 40)),
    blocks_per_span=st.sampled_from([1, 4]),
)
def test_each_query_sees_exactly_what_its_segments_mask_says(
    segments: tuple[Segment, ...], window: int | None, blocks_per_span: int
) -> None:
    tiles = cut_tiles(segments)
    seen = compute_visibility(
        segments,
        tiles,
        window=window,
        block_size=BLOCK_SIZE,
        blocks_per_span=blocks_per_span,
        min_width=1,
    )
    token = 0
    for segment in segments:
        slots = np.concatenate([np.arange(*run) for run in segment.slot_runs])
        for row_of_mask in segment.compute_mask(window):
            expected = np.zeros(NUM_BLOCKS * BLOCK_SIZE, dtype=np.bool_)
            expected[slots[row_of_mask]] = True
            row = int(tiles.row_idx[token])
            assert tiles.token_idx[row] == token
            actual = read_row(segments, tiles, seen, row, blocks_per_span=blocks_per_span)
            assert (actual == expected).all()
            token += 1


def test_empty_tiles_see_and_read_nothing() -> None:
    segments = tuple(
        Segment(num_cached=3, num_chain=1, tree=None, slot_runs=((16 * i, 16 * i + 4),))
        for i in range(3)
    )
    tiles = cut_tiles(segments)
    seen = compute_visibility(
        segments, tiles, window=None, block_size=4, blocks_per_span=1, min_width=8
    )
    assert (tiles.num_tiles, len(tiles.segment_idx)) == (4, 3)
    assert seen.kv_counts.tolist() == [1, 1, 1, 0]
    assert not seen.visible_below[3].any()
    assert seen.kv_spans.shape == (4, 8)


def test_keys_out_of_a_windows_sight_are_not_read() -> None:
    segment = Segment(num_cached=40, num_chain=1, tree=None, slot_runs=((0, 41),))
    seen = compute_visibility(
        (segment,), cut_tiles((segment,)), window=6, block_size=4, blocks_per_span=1, min_width=1
    )
    assert seen.kv_spans[0, : seen.kv_counts[0]].tolist() == [8, 9, 10]


@pytest.mark.parametrize(
    ("counts", "length"),
    [([1] * 16, 4), ([9, 12], 16), ([33], 64), ([512], 128), ([1, 1, 512], 64)],
)
def test_tile_length_follows_the_queries(counts: list[int], length: int) -> None:
    assert choose_tile_length(counts) == length
    assert length in TILE_LENGTHS


def test_shapes_take_few_values_over_all_steps_of_a_growing_answer() -> None:
    """Each shape is a compilation, so a whole answer must not meet more than a handful."""
    shapes = set()
    for num_cached in range(20, 400):
        for num_nodes in (0, 3, 8, 15):
            length = num_cached + 1 + num_nodes
            tree = None
            if num_nodes:
                rows = compute_ancestor_mask(np.arange(-1, num_nodes - 1, dtype=np.int32))
                tree = TreePart(depths=compute_depths(rows), rows=rows)
            segment = Segment(
                num_cached=num_cached, num_chain=1, tree=tree, slot_runs=((0, length),)
            )
            tiles = cut_tiles((segment,))
            seen = compute_visibility(
                (segment,), tiles, window=None, block_size=16, blocks_per_span=8, min_width=64
            )
            shapes.add((tiles.num_tiles, tiles.tile_length, *seen.kv_spans.shape[1:]))
    assert len(shapes) <= 3


@pytest.mark.parametrize(("value", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_rounding_goes_up_to_the_next_power_of_two(value: int, power: int) -> None:
    assert round_up_to_power(value) == power
