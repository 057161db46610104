"""Linear layers that read the same input as one product, with weights packed for the CPU.

oneDNN multiplies a weight in its own blocked order about 1.6 times as fast as a plain one where a
pass has few tokens and reading the weights is what takes time. A linear layer that is more than a
plain weight (quantised, or with hooks) is called as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

_BATCH_HINT = 16
"""Rows the packed order is chosen for; oneDNN chooses the same one for 1 and for 512."""


class Projection(Protocol):
    """One or several linear layers over one input."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [num_rows, the layers' outputs side by side] for [num_rows, num_inputs]."""
        ...

    def compute_exact(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the same in float32, as little rounded as the layers allow."""
        ...


class _Packed:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _BATCH_HINT)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._multiply(rows, self._weight, self._bias, "none", [], "")
        return product

    def compute_exact(self, rows: torch.Tensor) -> torch.Tensor:
        """See :class:`Projection`: what rounding took away is a second product's result."""
        rounded = self(rows)
        if rounded.dtype == torch.float32:
            return rounded
        rest = self._multiply.binary(rows, rounded, self._weight, self._bias, "sub")
        return rounded.float().add_(rest)


class _Plain:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.linear(rows, self._weight, self._bias)

    def compute_exact(self, rows: torch.Tensor) -> torch.Tensor:
        """See :class:`Projection`."""
        return self(rows).float()


class _SideBySide:
    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = tuple(layers)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if len(self._layers) == 1:
            product: torch.Tensor = self._layers[0](rows)
            return product
        return torch.cat([layer(rows) for layer in self._layers], dim=-1)

    def compute_exact(self, rows: torch.Tensor) -> torch.Tensor:
        """See :class:`Projection`."""
        return self(rows).float()


def fuse_linears(*layers: torch.nn.Module) -> Projection:
    """Return one projection that computes what the layers compute, side by side.

    The weights move into it, or are copied where they are packed; layers that must be called as
    they are keep theirs.
    """
    plain = [layer for layer in layers if _is_plain(layer)]
    if len(plain) < len(layers):
        return _SideBySide(layers)
    weight = torch.cat([layer.weight.detach() for layer in plain])
    biases = [layer.bias for layer in plain if layer.bias is not None]
    if biases and len(biases) < len(plain):
        return _SideBySide(layers)
    bias = torch.cat([one.detach() for one in biases]) if biases else None
    if _can_pack(weight):
        return _Packed(weight, bias)
    # A large model does not fit its GPU twice: the layers become views of the fused weight.
    parts = torch.split(weight, [len(layer.weight) for layer in plain])
    for layer, part in zip(plain, parts, strict=True):
        layer.weight.data = part
    return _Plain(weight, bias)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than its ``forward``."""
    is_wrapped = "forward" in vars(module)
    return bool(is_wrapped or module._forward_hooks or module._forward_pre_hooks)


def _is_plain(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) is torch.nn.Parameter
        and type(layer.weight.data) is torch.Tensor
        and not has_hooks(layer)
    )


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-any-return]
    return weight.dtype == torch.float32
