"""Which keys a tile of a segment's queries reads, and which of them are masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specrag_inference.attention.masks import BoolMask
    from specrag_inference.attention.step import Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """Some queries of one segment that lie behind each other.

    Attributes:
        first_query: first query of the tile, counted in the segment.
        num_queries: queries of the tile.
        first_key: first key any of them sees.
        end_key: one behind the last key any of them sees.
        masked_from: key from which on ``penalties`` apply; all queries see all keys before it.
        penalties: [num_queries, end_key - masked_from] float32, what is added to the scores: 0 or
            minus infinity; ``None`` when every query sees every key.
    """

    first_query: int
    num_queries: int
    first_key: int
    end_key: int
    masked_from: int
    penalties: NDArray[np.float32] | None


def cut_tiles(segment: Segment, *, window: int | None, max_queries: int) -> list[Tile]:
    """Return the tiles of a segment, at most ``max_queries`` queries each."""
    num_queries, num_keys = segment.num_queries, segment.num_keys
    if segment.sees_everything and (window is None or num_keys <= window):
        return [
            _make_open_tile(first, min(max_queries, num_queries - first), num_keys)
            for first in range(0, num_queries, max_queries)
        ]
    visible = segment.compute_mask(window)
    return [
        _make_tile(first, visible[first : first + max_queries])
        for first in range(0, num_queries, max_queries)
    ]


def _make_open_tile(first_query: int, num_queries: int, num_keys: int) -> Tile:
    return Tile(
        first_query=first_query,
        num_queries=num_queries,
        first_key=0,
        end_key=num_keys,
        masked_from=num_keys,
        penalties=None,
    )


def _make_tile(first_query: int, visible: BoolMask) -> Tile:
    seen = np.flatnonzero(visible.any(axis=0))
    first_key, end_key = int(seen[0]), int(seen[-1]) + 1
    hidden = np.flatnonzero(~visible[:, first_key:end_key].all(axis=0))
    masked_from = first_key + int(hidden[0]) if hidden.size else end_key
    penalties = None
    if hidden.size:
        part = visible[:, masked_from:end_key]
        penalties = np.where(part, np.float32(0.0), np.float32(-np.inf))
    return Tile(
        first_query=first_query,
        num_queries=len(visible),
        first_key=first_key,
        end_key=end_key,
        masked_from=masked_from,
        penalties=penalties,
    )
