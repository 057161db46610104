"""CPU attention as plain matrix products over the cache as it lies.

The query heads that share a key head stand side by side, so that a pass multiplies each layer's
keys and values once. Torch's fused kernel rearranges all keys of every call; with the keys stored
transposed nothing is rearranged, which for few queries takes less than half its time.

A bf16 product rounds the scores to 8 bits. On the bundled model that is lost in the noise of bf16
itself; where keys have a bias, scores grow to hundreds and rounding moves them by one. There the
product is taken a second time less the rounded scores, before it rounds: both together hold 16
bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from specrag_inference.attention.tiles import cut_tiles

if TYPE_CHECKING:
    from specrag_inference.attention.backends import LayerCall, PreparedAttention
    from specrag_inference.attention.step import Segment, StepInputs
    from specrag_inference.attention.tiles import Tile
    from specrag_inference.cache.transposed import TransposedKvStorage

TILE_QUERIES = 128
"""Queries a tile: a tile's scores should stay in the processor's cache."""


class SdpaBackend:
    """Attention of one tile of one sequence after another; see the module's docstring."""

    def __init__(self, storage: TransposedKvStorage) -> None:
        self._storage = storage

    def prepare(self, step: StepInputs) -> PreparedAttention:
        """See :class:`~specrag_inference.attention.backends.AttentionBackend`."""
        return _PreparedSdpa(self._storage, step)


class _PreparedSdpa:
    def __init__(self, storage: TransposedKvStorage, step: StepInputs) -> None:
        self._storage = storage
        self._segments = step.segments
        self._slots = _find_slots(step, storage.device)
        self._tiles: dict[int | None, list[list[tuple[Tile, torch.Tensor | None]]]] = {}
        self._scratch = _Scratch(storage.dtype, storage.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        self._storage.write(call.layer_idx, self._slots, key, value)
        num_heads, num_tokens, head_dim = query.shape
        grouped = query.view(len(key), -1, num_tokens, head_dim)
        output = query.new_empty((num_tokens, num_heads, head_dim))
        result = output.view(num_tokens, len(key), -1, head_dim).permute(1, 2, 0, 3)
        start = 0
        for segment, tiles in zip(self._segments, self._get_tiles(call.window), strict=True):
            keys, values = self._storage.read(call.layer_idx, segment.slot_runs)
            for tile, penalties in tiles:
                stop = start + tile.num_queries
                reach = slice(tile.first_key, tile.end_key)
                result[:, :, start:stop] = self._attend_tile(
                    grouped[:, :, start:stop],
                    keys[:, :, reach],
                    values[:, reach],
                    penalties,
                    call,
                )
                start = stop
        return output

    def _attend_tile(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        penalties: torch.Tensor | None,
        call: LayerCall,
    ) -> torch.Tensor:
        """Return [num_kv_heads, group, num_queries, head_dim] for a query of that shape.

        Args:
            query: as said.
            keys: [num_kv_heads, head_dim, num_keys].
            values: [num_kv_heads, num_keys, head_dim].
            penalties: added to the scores of the last keys.
            call: scaling and soft cap.
        """
        folded = query.reshape(len(keys), -1, query.shape[-1])
        scores = self._scratch.multiply(folded, keys, call)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        if penalties is not None:
            width = penalties.shape[-1]
            tail = scores.view(*query.shape[:3], -1)[..., -width:]
            tail.add_(penalties)
        torch.softmax(scores, dim=-1, out=scores)
        weights = self._scratch.round(scores)
        return torch.bmm(weights, values).view(query.shape)

    def _get_tiles(self, window: int | None) -> list[list[tuple[Tile, torch.Tensor | None]]]:
        """Return the tiles of every segment, built once for each window."""
        if window not in self._tiles:
            self._tiles[window] = [self._cut(segment, window) for segment in self._segments]
        return self._tiles[window]

    def _cut(self, segment: Segment, window: int | None) -> list[tuple[Tile, torch.Tensor | None]]:
        device = self._storage.device
        return [
            (
                tile,
                None if tile.penalties is None else torch.from_numpy(tile.penalties).to(device),
            )
            for tile in cut_tiles(segment, window=window, max_queries=TILE_QUERIES)
        ]


class _Scratch:
    """Memory for scores that all layers of a pass use again: fresh memory costs page faults."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._exact = torch.empty(0, dtype=torch.float32, device=device)
        self._coarse = torch.empty(0, dtype=dtype, device=device)
        self._is_coarse = dtype != torch.float32

    def multiply(self, query: torch.Tensor, keys: torch.Tensor, call: LayerCall) -> torch.Tensor:
        """Return [num_kv_heads, num_rows, num_keys] float32: scaled products, in scratch memory."""
        shape = (query.shape[0], query.shape[1], keys.shape[2])
        self._reserve(math.prod(shape))
        exact = self._exact[: math.prod(shape)].view(shape)
        if not self._is_coarse:
            return torch.bmm(query * call.scaling, keys, out=exact)
        is_power_of_two = math.frexp(call.scaling)[0] == 0.5
        if is_power_of_two:
            query = query * call.scaling
        coarse = self._coarse[: math.prod(shape)].view(shape)
        exact.copy_(torch.bmm(query, keys, out=coarse))
        if call.has_large_scores:
            exact.add_(coarse.baddbmm_(query, keys, beta=-1))
        return exact if is_power_of_two else exact.mul_(call.scaling)

    def round(self, exact: torch.Tensor) -> torch.Tensor:
        """Return the numbers in the dtype of the cache, in scratch memory."""
        if not self._is_coarse:
            return exact
        return self._coarse[: exact.numel()].view(exact.shape).copy_(exact)

    def _reserve(self, size: int) -> None:
        if size > self._exact.numel():
            self._exact = self._exact.new_empty(size)
            self._coarse = self._coarse.new_empty(size if self._is_coarse else 0)


def _find_slots(step: StepInputs, device: torch.device) -> torch.Tensor | slice:
    """Return where the tokens go: a slice when the slots follow each other."""
    slots = step.slot_ids
    first, last = int(slots[0]), int(slots[-1])
    if last - first == len(slots) - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, last + 1)
    return torch.from_numpy(slots).to(device)
