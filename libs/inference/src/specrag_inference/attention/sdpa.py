"""CPU attention over gathered blocks with torch's fused kernel.

The query heads that share a key head are folded into the query length: torch's kernel then sees one
query head a key head, which avoids its slow path for one query with grouped heads and repeats no
keys. Masks are additive in the dtype of the queries, built once a pass and shared by all layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from specrag_inference.attention.dense import compute_dense_attention

if TYPE_CHECKING:
    from specrag_inference.attention.backends import LayerCall, PreparedAttention
    from specrag_inference.attention.step import Segment, StepInputs
    from specrag_inference.cache.storage import KvStorage

MAX_FOLDED_MASK_ELEMENTS = 1 << 23
"""Above this, the mask is not repeated for each head of a group and torch repeats the keys."""


class SdpaBackend:
    """Fused attention, one sequence after another; soft-capped layers go the dense way."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage

    def prepare(self, step: StepInputs) -> PreparedAttention:
        """See :class:`~specrag_inference.attention.backends.AttentionBackend`."""
        return _PreparedSdpa(self._storage, step)


class _PreparedSdpa:
    def __init__(self, storage: KvStorage, step: StepInputs) -> None:
        self._storage = storage
        self._segments = step.segments
        self._slots = torch.from_numpy(step.slot_ids).to(storage.data.device)
        self._masks: dict[tuple[int, int | None, int], torch.Tensor | None] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        self._storage.write(call.layer_idx, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        if len(self._segments) == 1:
            return self._attend_segment(query, 0, call).transpose(0, 1)
        output = query.new_empty((query.shape[1], query.shape[0], query.shape[2]))
        start = 0
        for index, segment in enumerate(self._segments):
            stop = start + segment.num_queries
            part = self._attend_segment(query[:, start:stop], index, call)
            output[start:stop] = part.transpose(0, 1)
            start = stop
        return output

    def _attend_segment(self, query: torch.Tensor, index: int, call: LayerCall) -> torch.Tensor:
        """Return [num_heads, num_queries, head_dim] of one sequence."""
        segment = self._segments[index]
        keys, values = self._storage.read(call.layer_idx, segment.slot_runs)
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        if call.softcap is not None:
            mask = torch.from_numpy(segment.compute_mask(call.window)).to(query.device)
            return compute_dense_attention(query, keys, values, mask, call)
        num_heads, num_queries, head_dim = query.shape
        group = num_heads // keys.shape[0]
        folds = group * num_queries * segment.num_keys <= MAX_FOLDED_MASK_ELEMENTS
        if folds:
            query = query.reshape(keys.shape[0], group * num_queries, head_dim)
        output = functional.scaled_dot_product_attention(
            query[None],
            keys[None],
            values[None],
            attn_mask=self._get_mask(index, call.window, group if folds else 1),
            scale=call.scaling,
            enable_gqa=not folds,
        )
        return output.view(num_heads, num_queries, head_dim)

    def _get_mask(self, index: int, window: int | None, repeats: int) -> torch.Tensor | None:
        """Return the additive mask [repeats * num_queries, num_keys]; ``None`` = all visible."""
        key = (index, window, repeats)
        if key not in self._masks:
            self._masks[key] = _build_additive_mask(
                self._segments[index], window, repeats, like=self._storage.data
            )
        return self._masks[key]


def _build_additive_mask(
    segment: Segment, window: int | None, repeats: int, *, like: torch.Tensor
) -> torch.Tensor | None:
    if segment.sees_everything and (window is None or segment.num_keys <= window):
        return None
    visible = np.tile(segment.compute_mask(window), (repeats, 1))
    mask = like.new_zeros(visible.shape)
    return mask.masked_fill_(torch.from_numpy(~visible).to(like.device), float("-inf"))
