"""Which numbers of ranks a model can be split over."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class TensorParallelError(ValueError):
    """The model cannot be split as asked; the message names the degrees that can be had."""


def check_tp_size(config: PreTrainedConfig, tp_size: int) -> None:
    """Raise ``TensorParallelError`` unless ``tp_size`` ranks can share the model.

    Every rank needs whole key heads with all their query heads, a plan from transformers, and where
    GPUs are used one of its own.
    """
    if tp_size == 1:
        return
    text_config = config.get_text_config()
    if not text_config.base_model_tp_plan:
        raise TensorParallelError(
            f"tp_size={tp_size}: transformers has no tensor-parallel plan for "
            f"model_type={text_config.model_type}; valid: 1"
        )
    num_heads = text_config.num_attention_heads
    num_kv_heads = getattr(text_config, "num_key_value_heads", None) or num_heads
    valid = list_valid_degrees(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if tp_size not in valid:
        raise TensorParallelError(
            f"tp_size={tp_size} does not divide num_kv_heads={num_kv_heads}; "
            f"valid: {', '.join(map(str, valid))}"
        )
    num_gpus = torch.cuda.device_count()
    if torch.cuda.is_available() and tp_size > num_gpus:
        possible = [degree for degree in valid if degree <= num_gpus]
        raise TensorParallelError(
            f"tp_size={tp_size} exceeds the {num_gpus} GPUs of this machine; "
            f"valid: {', '.join(map(str, possible))}"
        )


def list_valid_degrees(*, num_heads: int, num_kv_heads: int) -> list[int]:
    """Return every degree that gives each rank whole key heads, ascending."""
    common = math.gcd(num_heads, num_kv_heads)
    return [degree for degree in range(1, common + 1) if common % degree == 0]
