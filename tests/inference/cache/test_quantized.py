"""Eight-bit keys and values: rounding, scales that travel, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_inference.attention.step import Segment
from specrag_inference.cache.quantized import SCALE_BYTES, QuantizedStorage
from specrag_inference.cache.storage import KvStorage
from specrag_inference.planned import count_token_bytes
from transformers import LlamaConfig

if TYPE_CHECKING:
    from specrag_inference.engine_config import KvCacheDtype

HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 2, 64, 4, 16
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8_e4m3": 2.0**-4}
"""Of a number, in parts of its row's largest one: half a step, at the top of the range."""


def build(kind: KvCacheDtype, dtype: torch.dtype = torch.float32) -> QuantizedStorage:
    storage = QuantizedStorage(
        KvStorage,
        kind,
        num_layers=2,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    storage.clear()
    return storage


def draw(num_tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, HEADS, HEAD_DIM, generator=generator)
    return rows * torch.logspace(-3, 3, num_tokens)[:, None, None]


@pytest.fixture(params=["int8", "fp8_e4m3"])
def kind(request: pytest.FixtureRequest) -> KvCacheDtype:
    name: KvCacheDtype = request.param
    return name


def test_numbers_come_back_within_half_a_step_of_their_row(kind: KvCacheDtype) -> None:
    storage = build(kind)
    keys, values = draw(8), draw(8, seed=1)
    storage.write(1, torch.arange(8), keys, values)
    for written, read in zip((keys, values), storage.read(1, [(0, 8)]), strict=True):
        largest = written.abs().amax(dim=-1, keepdim=True)
        assert ((written - read).abs() <= LARGEST_ERROR[kind] * largest * 1.001).all()
        assert not torch.equal(written, read)


def test_a_token_is_stored_alike_alone_and_among_others(kind: KvCacheDtype) -> None:
    together, alone = build(kind), build(kind)
    keys, values = draw(8), draw(8, seed=1)
    together.write(0, torch.arange(8), keys, values)
    for slot in range(8):
        alone.write(0, torch.tensor([slot]), keys[slot : slot + 1], values[slot : slot + 1])
    for one, other in zip(together.read(0, [(0, 8)]), alone.read(0, [(0, 8)]), strict=True):
        assert torch.equal(one, other)


def test_moved_tokens_take_their_scales_along(kind: KvCacheDtype) -> None:
    storage = build(kind)
    storage.write(0, torch.arange(8), draw(8), draw(8, seed=1))
    before = [part.clone() for part in storage.read(0, [(2, 4), (7, 8)])]
    storage.copy_slots(np.array([2, 3, 7]), np.array([40, 20, 21]))
    for one, other in zip(before, storage.read(0, [(40, 41), (20, 22)]), strict=True):
        assert torch.equal(one, other)


def test_rows_of_zeros_stay_zero_and_rows_that_are_not_finite_stay_so(kind: KvCacheDtype) -> None:
    storage = build(kind)
    keys = draw(3)
    keys[0], keys[1, 0, 5], keys[2, 1, 7] = 0.0, float("nan"), float("inf")
    storage.write(0, torch.arange(3), keys, keys)
    read, _ = storage.read(0, [(0, 3)])
    assert (read[0] == 0).all()
    assert not torch.isfinite(read[1, 0]).any()
    assert not torch.isfinite(read[2, 1]).any()
    assert torch.isfinite(read[1, 1]).all()


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.54), (torch.float32, 0.27)])
def test_memory_is_about_half_of_bf16_and_a_quarter_of_fp32(
    kind: KvCacheDtype, dtype: torch.dtype, share: float
) -> None:
    storage = build(kind, dtype)
    num_bytes = storage.codes.data.nbytes + storage.scales.data.nbytes
    assert num_bytes == NUM_BLOCKS * BLOCK_SIZE * count_token_bytes(
        LlamaConfig(num_hidden_layers=2, num_attention_heads=HEADS, head_dim=HEAD_DIM),
        1,
        scale_bytes=SCALE_BYTES,
    )
    full = 2 * 2 * NUM_BLOCKS * BLOCK_SIZE * HEADS * HEAD_DIM * dtype.itemsize
    assert num_bytes < share * full
    assert storage.read(0, [(0, 4)])[0].dtype is dtype


def test_a_compact_view_holds_each_sequences_tokens_in_their_order(kind: KvCacheDtype) -> None:
    storage = build(kind)
    storage.write(0, torch.arange(64), draw(64), draw(64, seed=1))
    runs = [((12, 16), (40, 46)), ((12, 16), (4, 7))]
    segments = tuple(
        Segment(num_cached=length - 1, num_chain=1, tree=None, slot_runs=run)
        for run, length in zip(runs, (10, 7), strict=True)
    )
    view = storage.view_pass(segments)
    keys, values = view.read(0)
    for segment, run in zip(view.segments, runs, strict=True):
        slots = np.concatenate([np.arange(*each) for each in segment.slot_runs])
        for compact, part in zip((keys, values), storage.read(0, run), strict=True):
            assert torch.equal(compact[:, slots].transpose(0, 1), part)
    assert keys.shape[1] == view.num_blocks * BLOCK_SIZE == 256
