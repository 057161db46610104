"""A lean forward pass over the weights of a known transformers decoder.

Most of a one-token step of a small model is not arithmetic: it is reading weights in an order the
processor dislikes, and the many small operations and calls between the products. This pass has the
layers' own weights, packed and fused, and half the operations. Which models it fits is decided by
family and by structure; all others run through transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from specrag_inference.models.fused_layers import FusedLayer, FusedNorm, Rotation
from specrag_inference.models.fused_linear import fuse_linears, has_hooks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specrag_inference.attention.backends import PreparedAttention

NORM_OFFSETS: dict[str, float] = {
    "LlamaForCausalLM": 0.0,
    "MistralForCausalLM": 0.0,
    "Qwen2ForCausalLM": 0.0,
    "Qwen3ForCausalLM": 0.0,
    "Gemma2ForCausalLM": 1.0,
    "Gemma3ForCausalLM": 1.0,
}
"""The families this pass reproduces, and what each adds to the weights of its norms."""

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH_PARTS = _LAYER_PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMED_ATTENTION_PARTS = _ATTENTION_PARTS | {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


class FusedDecoder:
    """Forward passes of one decoder; build it with :func:`fuse_decoder`."""

    def __init__(self, module: PreTrainedModel) -> None:
        base: Any = module.base_model
        config = module.config.get_text_config()
        offset = NORM_OFFSETS[type(module).__name__]
        self._embed = base.embed_tokens
        self._rotary = base.rotary_emb
        self._kinds: list[str] = list(
            getattr(config, "layer_types", None) or ["full_attention"] * len(base.layers)
        )
        self._has_kinds = type(module).__name__ == "Gemma3ForCausalLM"
        self._layers = [
            FusedLayer(
                layer,
                offset=offset,
                window=_find_window(layer.self_attn, config),
                dtype=module.dtype,
            )
            for layer in base.layers
        ]
        self._norm = FusedNorm(base.norm, offset=offset, dtype=module.dtype)
        self._head = fuse_linears(module.get_output_embeddings())  # type: ignore[no-untyped-call]
        self._vocab_size = int(config.vocab_size)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention: PreparedAttention,
    ) -> torch.Tensor:
        """Return [num_logit_rows, vocab_size] logits; keys and values go to the cache.

        Args:
            token_ids: [num_tokens] int64.
            position_ids: [num_tokens] int64.
            logit_rows: [num_logit_rows] int64, rows whose logits are wanted.
            attention: the pass's attention.
        """
        residual: torch.Tensor = self._embed(token_ids).to(torch.float32, copy=True)
        rotations = self._compute_rotations(residual, position_ids)
        for layer, kind in zip(self._layers[:-1], self._kinds, strict=False):
            layer.finish(residual, layer.attend(residual, rotations[kind], attention))
        # Behind the last attention only the rows that are asked for matter.
        last = self._layers[-1]
        heads = last.attend(residual, rotations[self._kinds[len(self._layers) - 1]], attention)
        if not len(logit_rows):
            return residual.new_empty((0, self._vocab_size))
        residual = residual[logit_rows]
        last.finish(residual, heads[logit_rows])
        logits = self._head.compute_exact(self._norm(residual))
        if self._softcap is not None:
            logits = logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits

    def _compute_rotations(
        self, residual: torch.Tensor, position_ids: torch.Tensor
    ) -> dict[str, Rotation]:
        """Return the factors for each kind of layer."""
        kinds = set(self._kinds)
        if not self._has_kinds:
            rotation = _make_rotation(*self._rotary(residual, position_ids[None]))
            return dict.fromkeys(kinds, rotation)
        return {
            kind: _make_rotation(*self._rotary(residual, position_ids[None], kind))
            for kind in kinds
        }


def fuse_decoder(module: PreTrainedModel) -> FusedDecoder | None:
    """Return the lean forward pass of a model, or ``None`` when only transformers' own fits it."""
    if type(module).__name__ not in NORM_OFFSETS or has_hooks(module):
        return None
    base: Any = module.base_model
    fits = hasattr(base, "layers") and all(_fits(layer) for layer in base.layers)
    return FusedDecoder(module) if fits else None


def _fits(layer: Any) -> bool:
    """Whether the layer has exactly the parts that are reproduced, called without side effects."""
    parts = {name for name, _ in layer.named_children()}
    if parts not in (_LAYER_PARTS, _SANDWICH_PARTS):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    attention_parts = {name for name, _ in attention.named_children()}
    watched = [layer, *(child for name, child in layer.named_children())]
    return (
        attention_parts in (_ATTENTION_PARTS, _NORMED_ATTENTION_PARTS)
        and {name for name, _ in mlp.named_children()} == _MLP_PARTS
        and not any(has_hooks(one) for one in watched)
    )


def _find_window(attention: Any, config: Any) -> int | None:
    """Return how many positions back a layer sees; Mistral keeps it in the config alone."""
    if hasattr(attention, "sliding_window"):
        window: int | None = attention.sliding_window
        return window
    return getattr(config, "sliding_window", None) if config.model_type == "mistral" else None


def _make_rotation(cos: torch.Tensor, sin: torch.Tensor) -> Rotation:
    half = cos.shape[-1] // 2
    signed = sin[0].clone()
    signed[:, :half].neg_()
    return Rotation(cos=cos[0][:, None], sin=signed[:, None])
