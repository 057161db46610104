"""Scores of the CPU backend in bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from specrag_inference.attention.backends import LayerCall
from specrag_inference.attention.dense import DenseBackend
from specrag_inference.attention.sdpa import SdpaBackend
from specrag_inference.attention.step import Segment, StepInputs
from specrag_inference.cache.storage import KvStorage
from specrag_inference.cache.transposed import TransposedKvStorage

NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM = 40, 2, 64
STEP = StepInputs(
    token_ids=np.zeros(NUM_TOKENS, dtype=np.int64),
    position_ids=np.arange(NUM_TOKENS),
    slot_ids=np.arange(NUM_TOKENS),
    logit_rows=np.arange(NUM_TOKENS),
    segments=(
        Segment(num_cached=0, num_chain=NUM_TOKENS, tree=None, slot_runs=((0, NUM_TOKENS),)),
    ),
)


def compute_error(scaling: float, *, has_large_scores: bool) -> float:
    """Return the largest difference to the reference where scores reach hundreds."""
    generator = torch.Generator().manual_seed(1)

    def draw(num_heads: int, size: float) -> torch.Tensor:
        shape = (num_heads, NUM_TOKENS, HEAD_DIM)
        return (torch.randn(shape, generator=generator) * size).bfloat16()

    size = (1 / (scaling * 64**0.5)) ** 0.5 * 8
    query, key, value = draw(6, size), draw(NUM_KV_HEADS, size), draw(NUM_KV_HEADS, 1.0)
    call = LayerCall(
        layer_idx=0,
        scaling=scaling,
        window=None,
        softcap=None,
        has_large_scores=has_large_scores,
    )
    sizes = {
        "num_layers": 1,
        "num_blocks": 4,
        "block_size": 16,
        "num_kv_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
    }
    place = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    fast = SdpaBackend(TransposedKvStorage(**sizes, **place))  # type: ignore[arg-type]
    plain = DenseBackend(KvStorage(**sizes, **place))  # type: ignore[arg-type]
    results = [
        backend.prepare(STEP).attend(query, key, value, call).float() for backend in (fast, plain)
    ]
    return float((results[0] - results[1]).abs().max())


@pytest.mark.parametrize("scaling", [0.125, 0.1])
def test_large_scores_are_as_exact_as_the_reference_where_the_layer_says_so(
    scaling: float,
) -> None:
    assert compute_error(scaling, has_large_scores=True) < 0.04
    assert compute_error(scaling, has_large_scores=False) > 0.1
