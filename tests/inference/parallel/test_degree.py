from __future__ import annotations

import pytest
import torch
from specrag_inference.parallel.degree import (
    TensorParallelError,
    check_tp_size,
    list_valid_degrees,
)
from specrag_inference.parallel.process_group import share_threads
from specrag_inference.testing import build_tiny_config
from transformers import GPT2Config, LlamaConfig


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "valid"),
    [
        (64, 8, [1, 2, 4, 8]),
        (9, 3, [1, 3]),
        (6, 2, [1, 2]),
        (12, 12, [1, 2, 3, 4, 6, 12]),
        (8, 1, [1]),
    ],
)
def test_valid_degrees_give_every_rank_whole_key_heads(
    num_heads: int, num_kv_heads: int, valid: list[int]
) -> None:
    assert list_valid_degrees(num_heads=num_heads, num_kv_heads=num_kv_heads) == valid


def test_degree_that_does_not_divide_is_refused_with_the_valid_ones() -> None:
    config = LlamaConfig(num_attention_heads=64, num_key_value_heads=8, hidden_size=64)
    with pytest.raises(TensorParallelError) as caught:
        check_tp_size(config, 6)
    assert str(caught.value) == "tp_size=6 does not divide num_kv_heads=8; valid: 1, 2, 4, 8"


def test_family_without_a_plan_is_refused_above_one_rank() -> None:
    check_tp_size(GPT2Config(), 1)
    with pytest.raises(TensorParallelError, match=r"no tensor-parallel plan for model_type=gpt2"):
        check_tp_size(GPT2Config(), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs limit the degree")
def test_valid_degree_is_accepted() -> None:
    check_tp_size(build_tiny_config(num_kv_heads=3), 3)


@pytest.mark.parametrize(
    ("num_threads", "num_ranks", "share"), [(8, 2, 4), (8, 3, 2), (1, 3, 1), (2, 2, 1)]
)
def test_threads_of_a_replica_are_shared_out(num_threads: int, num_ranks: int, share: int) -> None:
    assert share_threads(num_threads, num_ranks) == share
