"""One decoder layer's work with few operations, over the weights of a transformers layer.

The residual stream is float32: it is added to in place and normed without being converted, and in
bf16 it rounds once less a layer than transformers' own forward pass does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from specrag_inference.attention.backends import LayerCall, may_have_large_scores
from specrag_inference.models.fused_linear import fuse_linears

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_inference.attention.backends import PreparedAttention


class Rotation(NamedTuple):
    """Rotary factors of one pass, [num_tokens, 1, head_dim] float32.

    Attributes:
        cos: factor of a number.
        sin: factor of the number half a head away, negative in the first half.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class FusedNorm:
    """Root-mean-square norm in float32.

    Args:
        module: the transformers norm.
        offset: what is added to its weight; Gemma's norms store the weight minus one.
        dtype: of the result.
    """

    def __init__(self, module: Any, *, offset: float, dtype: torch.dtype) -> None:
        weight = module.weight.detach().float() + offset
        epsilon = getattr(module, "variance_epsilon", None) or module.eps
        # x / sqrt(mean(x²) + ε) = sqrt(n) * x / sqrt(sum(x²) + n * ε)
        self._weight = weight * weight.numel() ** 0.5
        self._floor = float(epsilon) * weight.numel()
        self._dtype = dtype

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [..., size] in the norm's dtype for [..., size] float32."""
        scale = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        scale.square_().add_(self._floor).rsqrt_()
        return torch.mul(rows, scale).mul_(self._weight).to(self._dtype)


class FusedAttention:
    """Projections, head norms and rotation of one layer around the pass's attention."""

    def __init__(self, module: Any, *, offset: float, window: int | None) -> None:
        self._qkv = fuse_linears(module.q_proj, module.k_proj, module.v_proj)
        self._output = fuse_linears(module.o_proj)
        weight: torch.Tensor = module.q_proj.weight
        self._head_dim = int(module.head_dim)
        self._num_kv_heads = module.k_proj.weight.shape[0] // self._head_dim
        self._num_heads = weight.shape[0] // self._head_dim
        self._head_norms = None
        if hasattr(module, "q_norm"):
            self._head_norms = tuple(
                FusedNorm(norm, offset=offset, dtype=torch.float32)
                for norm in (module.q_norm, module.k_norm)
            )
        self._call = LayerCall(
            layer_idx=int(module.layer_idx),
            scaling=float(module.scaling),
            window=window,
            softcap=getattr(module, "attn_logit_softcapping", None),
            has_large_scores=may_have_large_scores(module),
        )

    def attend(
        self, rows: torch.Tensor, rotation: Rotation, attention: PreparedAttention
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads * head_dim] before the output projection."""
        num_tokens, num_heads, num_kv = len(rows), self._num_heads, self._num_kv_heads
        heads = self._qkv(rows).view(num_tokens, -1, self._head_dim)
        turned = self._rotate(heads[:, : num_heads + num_kv], rotation)
        output = attention.attend(
            turned[:, :num_heads].transpose(0, 1),
            turned[:, num_heads:].transpose(0, 1),
            heads[:, num_heads + num_kv :].transpose(0, 1),
            self._call,
        )
        return output.reshape(num_tokens, -1)

    def project(self, heads: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, hidden_size] for rows of what :meth:`attend` returned."""
        return self._output(heads)

    def _rotate(self, heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        exact = heads.float()
        if self._head_norms is not None:
            query_norm, key_norm = self._head_norms
            queries, keys = exact[:, : self._num_heads], exact[:, self._num_heads :]
            exact = torch.cat((query_norm(queries), key_norm(keys)), dim=1)
        swapped = torch.roll(exact, self._head_dim // 2, dims=-1)
        return torch.mul(exact, rotation.cos).addcmul_(swapped, rotation.sin).to(heads.dtype)


class FusedMlp:
    """Gated feed-forward layer; gate and up projection in one product."""

    def __init__(self, module: Any) -> None:
        self._gate_up = fuse_linears(module.gate_proj, module.up_proj)
        self._down = fuse_linears(module.down_proj)
        self._activate: Callable[[torch.Tensor], torch.Tensor] = module.act_fn

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, hidden_size] for [num_rows, hidden_size]."""
        gate, up = self._gate_up(rows).chunk(2, dim=-1)
        return self._down(self._activate(gate).mul_(up))


class FusedLayer:
    """One decoder layer; ``sandwich`` layers also norm what they add to the residual stream."""

    def __init__(
        self, layer: Any, *, offset: float, window: int | None, dtype: torch.dtype
    ) -> None:
        def build_norm(name: str, result: torch.dtype = dtype) -> FusedNorm:
            return FusedNorm(getattr(layer, name), offset=offset, dtype=result)

        self.attention = FusedAttention(layer.self_attn, offset=offset, window=window)
        self._mlp = FusedMlp(layer.mlp)
        self._before_attention = build_norm("input_layernorm")
        self._after_attention: FusedNorm | None = None
        self._after_mlp: FusedNorm | None = None
        before_mlp = "post_attention_layernorm"
        if hasattr(layer, "pre_feedforward_layernorm"):
            before_mlp = "pre_feedforward_layernorm"
            self._after_attention = build_norm("post_attention_layernorm", torch.float32)
            self._after_mlp = build_norm("post_feedforward_layernorm", torch.float32)
        self._before_mlp = build_norm(before_mlp)

    def attend(
        self, residual: torch.Tensor, rotation: Rotation, attention: PreparedAttention
    ) -> torch.Tensor:
        """Return [num_tokens, num_heads * head_dim] for the residual stream."""
        return self.attention.attend(self._before_attention(residual), rotation, attention)

    def finish(self, residual: torch.Tensor, heads: torch.Tensor) -> None:
        """Add attention output and feed-forward output to ``residual`` in place, row by row."""
        added = self.attention.project(heads)
        residual.add_(
            added if self._after_attention is None else self._after_attention(added.float())
        )
        added = self._mlp(self._before_mlp(residual))
        residual.add_(added if self._after_mlp is None else self._after_mlp(added.float()))
