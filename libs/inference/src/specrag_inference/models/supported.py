"""Refuses models whose attention the block cache cannot reproduce exactly.

Every layer of a supported model is causal softmax attention, full or windowed, over keys and values
of its own, rotated by angles that depend on a token's position alone. What departs from that would
not fail but answer wrongly, so it is named and refused when the model is described.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.models.reference import ModelReferenceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedConfig, PreTrainedModel

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPES = {"dynamic", "longrope"}


class UnsupportedModelError(ModelReferenceError):
    """A model whose attention cannot be served from block-paged keys and values."""


def check_supported(module: PreTrainedModel) -> None:
    """Raise unless every layer's attention can be served from the block cache.

    Raises:
        UnsupportedModelError: naming all that stands in the way.
    """
    config = module.config.get_text_config()
    obstacles = list(_find_obstacles(module, config))
    if obstacles:
        raise UnsupportedModelError(
            f"model type '{config.model_type}' cannot be served: {'; '.join(obstacles)}. Choose a "
            "decoder with full or sliding-window attention, such as Llama, Qwen2, Qwen3, Gemma 2, "
            "Gemma 3 or Mistral"
        )


def _find_obstacles(module: PreTrainedModel, config: PreTrainedConfig) -> Iterator[str]:
    if not module._supports_attention_backend:
        yield "its layers do not go through transformers' attention interface"
    if getattr(module.config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its attention looks ahead (use_bidirectional_attention)"
    if getattr(config, "kv_lora_rank", None):
        yield "its keys and values are latent (kv_lora_rank)"
    if getattr(config, "num_kv_shared_layers", None):
        yield "layers share keys and values (num_kv_shared_layers)"
    if any(name.endswith("sinks") for name, _ in module.named_parameters()):
        yield "its attention has learned sinks"
    if other := set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES:
        yield f"layer_types has {', '.join(sorted(other))}"
    if ropes := set(_list_rope_types(config)) & _LENGTH_DEPENDENT_ROPES:
        yield f"its rotary angles depend on the text's length (rope_type {', '.join(ropes)})"


def _list_rope_types(config: PreTrainedConfig) -> Iterator[str]:
    """Yield the kinds of rotary embedding, of which a config may have one for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for group in (parameters, *parameters.values()):
        if isinstance(group, dict) and "rope_type" in group:
            yield group["rope_type"]
