"""Models that block attention would serve wrongly are refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.models.reference import ModelReferenceError
from specrag_inference.models.supported import check_supported
from transformers import AutoConfig, AutoModelForCausalLM

from tests.inference.models.families import CONFIGS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": DYNAMIC}, "rope_type dynamic"),
    ("llama", {"rope_parameters": LONG}, "rope_type longrope"),
    ("gpt_oss", {"num_local_experts": 2}, "learned sinks"),
    ("deepseek_v3", {"n_routed_experts": 8, "num_key_value_heads": 4}, "kv_lora_rank"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "looks ahead"),
    ("llama4_text", {"layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
    ("bloom", {"n_head": 4}, "attention interface"),
]


def build_on_meta(model_type: str, fields: dict[str, Any]) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **{**SMALL, **fields})
    with torch.device("meta"), quiet_transformers():
        module: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return module


@pytest.mark.parametrize(("model_type", "fields", "reason"), REFUSED)
def test_unsupported_attention_is_refused_and_named(
    model_type: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelReferenceError, match=reason) as refusal:
        check_supported(build_on_meta(model_type, fields))
    assert "Llama" in str(refusal.value)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "phi3", "olmo2", "smollm3"])
def test_plain_decoders_of_other_families_are_taken(model_type: str) -> None:
    check_supported(build_on_meta(model_type, {}))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_every_tested_family_is_taken(name: str) -> None:
    with torch.device("meta"), quiet_transformers():
        check_supported(AutoModelForCausalLM.from_config(CONFIGS[name]()))  # type: ignore[no-untyped-call]
