"""Slot ranges and moving stored tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from specrag_inference.cache.storage import KvStorage, compute_slot_runs


def build_storage() -> KvStorage:
    storage = KvStorage(
        num_layers=2,
        num_blocks=4,
        block_size=4,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    values = torch.arange(16, dtype=torch.float32)
    storage.data[:] = values[None, None, :, None, None]
    return storage


def test_consecutive_blocks_are_read_as_a_view_without_copying() -> None:
    storage = build_storage()
    keys, _ = storage.read(1, compute_slot_runs([1, 2], 4, 7))
    assert keys[:, 0, 0].tolist() == [4, 5, 6, 7, 8, 9, 10]
    assert keys.untyped_storage().data_ptr() == storage.data.untyped_storage().data_ptr()


def test_scattered_blocks_are_read_in_order() -> None:
    storage = build_storage()
    keys, values = storage.read(0, compute_slot_runs([3, 0, 1], 4, 9))
    assert keys[:, 0, 0].tolist() == [12, 13, 14, 15, 0, 1, 2, 3, 4]
    assert torch.equal(keys, values)


@given(
    blocks=st.permutations(range(6)),
    length=st.integers(0, 24),
)
def test_slot_runs_cover_exactly_the_tokens_in_order(blocks: list[int], length: int) -> None:
    expected = [blocks[i // 4] * 4 + i % 4 for i in range(length)]
    runs = compute_slot_runs(blocks, 4, length)
    assert [slot for start, stop in runs for slot in range(start, stop)] == expected


def test_overlapping_moves_read_before_they_write() -> None:
    storage = build_storage()
    storage.copy_slots(np.array([1, 2, 3]), np.array([0, 1, 2]))
    assert storage.data[1, 1, :4, 0, 0].tolist() == [1, 2, 3, 3]
