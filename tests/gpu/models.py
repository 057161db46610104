"""Models the GPU checks run on: real shapes with random weights, and the bundled model."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
from specrag_inference.attention.backends import ATTENTION_NAME, register_attention
from specrag_inference.models.loading import LoadedModel, describe_model, load_model
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.models.reference import BUNDLED_TARGET
from transformers import AutoModelForCausalLM, LlamaConfig

if TYPE_CHECKING:
    from pathlib import Path

_LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
}
_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 131_072,
}


def build_shaped_model(device: torch.device, *, tiny: bool) -> LoadedModel:
    """Return a model of the shape of an 8B Llama with random bf16 weights, or a tiny fp32 one."""
    register_attention()
    config = LlamaConfig(**(_TINY if tiny else _LLAMA_8B), tie_word_embeddings=False)
    with device, quiet_transformers():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=torch.float32 if tiny else torch.bfloat16,
            attn_implementation=ATTENTION_NAME,
        )
    return describe_model(module, model_id="tiny" if tiny else "llama-8b-shape", revision="random")


def load_bundled_model(cache_dir: Path) -> LoadedModel | None:
    """Return the bundled model, or ``None`` where its package is not installed."""
    package = BUNDLED_TARGET.removeprefix("package:").partition("/")[0]
    if importlib.util.find_spec(package) is None:
        return None
    return load_model(BUNDLED_TARGET, cache_dir=cache_dir)
