"""Smaller weights for draft models, through torchao.

Only the decoder's linear layers are quantised: embeddings and the output layer keep their
precision, because they decide the argmax and are often one tensor. Whatever a draft model says, the
output law stays the target's; a coarser draft model is only accepted less often.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig
    from transformers import PreTrainedModel

    from specrag_inference.plan import QuantizationName

FP8_CAPABILITY: Final = (8, 9)
"""Least compute capability with fp8 matrix products."""


class QuantizationError(ValueError):
    """The model cannot be quantised as asked on this machine; the message says what can."""


def check_quantization(name: QuantizationName, *, tp_size: int = 1) -> None:
    """Raise ``QuantizationError`` when this machine cannot do it.

    ``int8`` (weights only) runs on CPU and GPU; ``fp8`` (weights and activations) needs a GPU.
    """
    if name == "none":
        return
    if tp_size > 1:
        raise QuantizationError(
            f"quantization={name} does not go with tp_size={tp_size}; "
            "set quantization=none or tp_size=1"
        )
    if name == "fp8" and _get_capability() < FP8_CAPABILITY:
        raise QuantizationError(
            "quantization=fp8 needs a GPU of compute capability "
            f"{_spell(FP8_CAPABILITY)} or newer, this machine has {_spell(_get_capability())}; "
            "use int8 or none"
        )


def quantize_model(module: PreTrainedModel, name: QuantizationName) -> None:
    """Replace the decoder's linear weights in place; ``none`` changes nothing.

    Raises:
        QuantizationError: this machine cannot do it.
    """
    check_quantization(name)
    if name == "none":
        return
    from torchao.quantization import quantize_  # noqa: PLC0415 - 2 s, for those who quantise

    output_layer = module.get_output_embeddings()  # type: ignore[no-untyped-call]

    def is_decoder_linear(layer: torch.nn.Module, _name: str) -> bool:
        return isinstance(layer, torch.nn.Linear) and layer is not output_layer

    quantize_(module, _make_config(name), filter_fn=is_decoder_linear)


def count_weight_bytes(module: torch.nn.Module) -> int:
    """Return the memory of all weights, a shared tensor counted once."""
    storages = {
        part.untyped_storage().data_ptr(): part.untyped_storage().nbytes()
        for weight in module.parameters()
        for part in _list_parts(weight)
    }
    return sum(storages.values())


def _list_parts(weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors that hold a weight: itself, or a quantised one's data and scales."""
    if not hasattr(weight, "__tensor_flatten__") or type(weight) is torch.nn.Parameter:
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in _list_parts(getattr(weight, name))]


def _make_config(name: QuantizationName) -> AOBaseConfig:
    from torchao.quantization import (  # noqa: PLC0415 - as above
        Float8DynamicActivationFloat8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
    )

    if name == "int8":
        return Int8WeightOnlyConfig()
    return Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())


def _get_capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def _spell(capability: tuple[int, int]) -> str:
    return "none" if capability == (0, 0) else f"{capability[0]}.{capability[1]}"
