"""The seam between transformers' layers and the block cache.

A model loaded with ``attn_implementation=ATTENTION_NAME`` calls :func:`attend_over_blocks` in every
layer and builds no mask of its own. The pass's :class:`PreparedAttention` travels with the model's
keyword arguments, so a model has no state between passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from transformers import AttentionInterface

if TYPE_CHECKING:
    import torch

    from specrag_inference.attention.step import StepInputs

ATTENTION_NAME = "specrag_blocks"
"""What ``attn_implementation`` is set to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What one layer asks of attention.

    Attributes:
        layer_idx: which layer's keys and values.
        scaling: factor on the products of queries and keys.
        window: how many positions back a query sees, its own included; ``None`` = all.
        softcap: bound of the scores through ``softcap * tanh(score / softcap)``; ``None`` = none.
        has_large_scores: whether scores may be so large that bf16 is too coarse for them.
    """

    layer_idx: int
    scaling: float
    window: int | None
    softcap: float | None
    has_large_scores: bool = False


class PreparedAttention(Protocol):
    """Attention of one forward pass, masks ready."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: LayerCall
    ) -> torch.Tensor:
        """Store this pass's keys and values, then attend.

        Args:
            query: [num_heads, num_tokens, head_dim].
            key: [num_kv_heads, num_tokens, head_dim].
            value: [num_kv_heads, num_tokens, head_dim].
            call: the layer's own numbers.

        Returns:
            [num_tokens, num_heads, head_dim] in the dtype of ``query``.
        """


class AttentionBackend(Protocol):
    """Computes attention of many sequences over cached blocks.

    All backends give equal results up to rounding; a congruence test holds them together.
    """

    def prepare(self, step: StepInputs) -> PreparedAttention:
        """Do once a pass what all layers share: masks, slot ranges, tensors on the device."""


def attend_over_blocks(  # noqa: PLR0913 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - masks come with the prepared step
    *,
    prepared_attention: PreparedAttention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Hand one layer's attention to the pass's backend (transformers' attention interface)."""
    call = LayerCall(
        layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        has_large_scores=may_have_large_scores(module),
    )
    return prepared_attention.attend(query[0], key[0], value[0], call)[None], None


def may_have_large_scores(module: torch.nn.Module) -> bool:
    """Whether an attention module's keys have a bias, which in Qwen2 grows to hundreds."""
    return getattr(getattr(module, "k_proj", None), "bias", None) is not None


def register_attention() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers; repeating it changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attend_over_blocks)
