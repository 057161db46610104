"""The layout for products on the CPU: what is written is read, in order, after moves too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specrag_inference.cache.transposed import TransposedKvStorage

NUM_SLOTS = 16


@pytest.fixture
def storage() -> TransposedKvStorage:
    """Slot s of layer l holds the key 100 * l + s and the value -(100 * l + s)."""
    built = TransposedKvStorage(
        num_layers=2,
        num_blocks=4,
        block_size=4,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for layer in range(2):
        numbers = torch.arange(NUM_SLOTS, dtype=torch.float32) + 100 * layer
        rows = numbers[None, :, None].expand(1, NUM_SLOTS, 2)
        built.write(layer, slice(0, NUM_SLOTS), rows, -rows)
    return built


def list_slots(storage: TransposedKvStorage, runs: list[tuple[int, int]]) -> list[float]:
    keys, values = storage.read(1, runs)
    assert torch.equal(keys[0].t(), -values[0])
    assert torch.equal(keys[0, 0], keys[0, 1])
    found: list[float] = (keys[0, 0] - 100).tolist()
    return found


def test_one_run_is_read_as_a_view_without_copying(storage: TransposedKvStorage) -> None:
    keys, values = storage.read(1, [(4, 11)])
    assert keys.untyped_storage().data_ptr() == storage.keys.untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == storage.values.untyped_storage().data_ptr()
    assert list_slots(storage, [(4, 11)]) == [4, 5, 6, 7, 8, 9, 10]


def test_several_runs_are_read_in_order(storage: TransposedKvStorage) -> None:
    assert list_slots(storage, [(12, 16), (0, 4), (4, 5)]) == [12, 13, 14, 15, 0, 1, 2, 3, 4]


def test_scattered_slots_are_written_one_by_one(storage: TransposedKvStorage) -> None:
    rows = torch.tensor([[[170.0] * 2, [180.0] * 2, [190.0] * 2]])
    storage.write(1, torch.tensor([5, 15, 0]), rows, -rows)
    assert list_slots(storage, [(0, 2), (4, 6), (14, 16)]) == [90, 1, 4, 70, 14, 80]


def test_overlapping_moves_read_before_they_write(storage: TransposedKvStorage) -> None:
    storage.copy_slots(np.array([1, 2, 3]), np.array([0, 1, 2]))
    assert list_slots(storage, [(0, 5)]) == [1, 2, 3, 3, 4]
