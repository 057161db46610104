"""The reference: scores, mask, softmax and product written out in fp32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specrag_inference.attention.backends import LayerCall, PreparedAttention
    from specrag_inference.attention.step import Segment, StepInputs
    from specrag_inference.cache.storage import KvStorage


def compute_dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    call: LayerCall,
) -> torch.Tensor:
    """Return softmax(scaled, capped scores) @ value for one sequence, computed in fp32.

    Args:
        query: [num_heads, num_queries, head_dim].
        key: [num_kv_heads, num_keys, head_dim].
        value: [num_kv_heads, num_keys, head_dim].
        mask: [num_queries, num_keys] bool, true where visible.
        call: scaling and soft cap.
    """
    group = query.shape[0] // key.shape[0]
    keys = key.float().repeat_interleave(group, dim=0)
    values = value.float().repeat_interleave(group, dim=0)
    scores = query.float() @ keys.transpose(1, 2) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ values).to(query.dtype)


class DenseBackend:
    """Plain attention, one sequence after another; slow and easy to check."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage

    def prepare(self, step: StepInputs) -> PreparedAttention:
        """See :class:`~specrag_inference.attention.backends.AttentionBackend`."""
        return _PreparedDense(self._storage, step)


class _PreparedDense:
    def __init__(self, storage: KvStorage, step: StepInputs) -> None:
        self._storage = storage
        self._segments = step.segments
        self._slots = torch.from_numpy(step.slot_ids).to(storage.device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        self._storage.write(call.layer_idx, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        outputs = []
        start = 0
        for segment in self._segments:
            stop = start + segment.num_queries
            outputs.append(self._attend_segment(query[:, start:stop], segment, call))
            start = stop
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def _attend_segment(
        self, query: torch.Tensor, segment: Segment, call: LayerCall
    ) -> torch.Tensor:
        keys, values = self._storage.read(call.layer_idx, segment.slot_runs)
        mask = torch.from_numpy(segment.compute_mask(call.window)).to(query.device)
        return compute_dense_attention(
            query, keys.transpose(0, 1), values.transpose(0, 1), mask, call
        )
