"""Small random models of every family, each with what makes its attention special.

Sliding windows are shorter than most prompts of the tests, and the ``narrow`` ones shorter than a
tree is deep, so that their edge falls inside prompt and tree alike. Norm weights and biases are
drawn too: at their initial 1 and 0 a forgotten one would not show.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from specrag_inference.attention.backends import ATTENTION_NAME, register_attention
from specrag_inference.models.loading import describe_model
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.testing import BYTE_VOCAB_SIZE
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_inference.models.loading import LoadedModel
    from transformers import PreTrainedConfig, PreTrainedModel

WINDOW = 20
NARROW_WINDOW = 4

_SHAPE: dict[str, Any] = {
    "vocab_size": BYTE_VOCAB_SIZE + 5,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # twice hidden_size / num_attention_heads
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 258,
    "tie_word_embeddings": False,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_GEMMA3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
}
_ALTERNATING = ["sliding_attention", "full_attention"]


def _gemma2(window: int) -> PreTrainedConfig:
    return Gemma2Config(
        **_SHAPE,
        sliding_window=window,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=10.0,
    )


def _gemma3(window: int) -> PreTrainedConfig:
    return Gemma3TextConfig(
        **_SHAPE,
        sliding_window=window,
        layer_types=_ALTERNATING,
        query_pre_attn_scalar=24,
        rope_parameters=_GEMMA3_ROPE,
    )


def _qwen2(window: int) -> PreTrainedConfig:
    shape = {**_SHAPE, "num_hidden_layers": 3}
    return Qwen2Config(**shape, use_sliding_window=True, sliding_window=window, max_window_layers=1)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama3-rope": lambda: LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3_ROPE),
    "llama-yarn": lambda: LlamaConfig(**_SHAPE, rope_parameters=_YARN_ROPE),
    "llama-biased": lambda: LlamaConfig(**_SHAPE, attention_bias=True, mlp_bias=True),
    "llama-tied-one-kv-head": lambda: LlamaConfig(
        **{**_SHAPE, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "llama-all-heads": lambda: LlamaConfig(**{**_SHAPE, "num_key_value_heads": 6, "head_dim": 8}),
    "qwen2": lambda: Qwen2Config(**_SHAPE),
    "qwen2-sliding": lambda: _qwen2(WINDOW),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "qwen3-biased": lambda: Qwen3Config(**_SHAPE, attention_bias=True),
    "gemma2": lambda: _gemma2(WINDOW),
    "gemma2-narrow": lambda: _gemma2(NARROW_WINDOW),
    "gemma3": lambda: _gemma3(WINDOW),
    "gemma3-narrow": lambda: _gemma3(NARROW_WINDOW),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "mistral-narrow": lambda: MistralConfig(**_SHAPE, sliding_window=NARROW_WINDOW),
    "mistral-full": lambda: MistralConfig(**_SHAPE, sliding_window=None),
}


class ReferenceModel:
    """One config twice with equal weights: for our core, and untouched for transformers itself.

    Attributes:
        name: key in :data:`CONFIGS`.
        loaded: the model as our core gets it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        config = CONFIGS[name]()
        self._plain = _build_module(config, "eager")
        ours = _build_module(config, ATTENTION_NAME)
        ours.load_state_dict(self._plain.state_dict())
        self.loaded = describe_model(ours, model_id=name, revision="random")
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def compute_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Return [len(token_ids), vocab_size] float32 by transformers' own plain forward."""
        key = tuple(token_ids)
        if key not in self._known:
            with torch.no_grad():
                output = self._plain(torch.tensor([token_ids]), use_cache=False)
            self._known[key] = output.logits[0, :, :BYTE_VOCAB_SIZE]
        return self._known[key]

    def compute_logits_under(self, token_ids: list[int], changes: dict[str, Any]) -> torch.Tensor:
        """Return the last logits of the same weights under a changed config."""
        config = CONFIGS[self.name]()
        for field, value in changes.items():
            setattr(config, field, value)
        module = _build_module(config, "eager")
        module.load_state_dict(self._plain.state_dict(), strict=False)
        with torch.no_grad():
            output = module(torch.tensor([token_ids]), use_cache=False)
        logits: torch.Tensor = output.logits[0, -1, :BYTE_VOCAB_SIZE]
        return logits

    def load(self, dtype: torch.dtype, device: torch.device) -> LoadedModel:
        """Return a further copy for our core in another dtype or place."""
        module = _build_module(CONFIGS[self.name](), ATTENTION_NAME)
        module.load_state_dict(self._plain.state_dict())
        torch.nn.Module.to(module, device=device, dtype=dtype)
        return describe_model(module, model_id=self.name, revision="random")


def _build_module(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    register_attention()
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(11)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=attention
        )
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    module.eval()  # type: ignore[no-untyped-call]
    return module
