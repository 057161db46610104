"""Keys and values in eight bits, with a scale for each token and head.

Every token is quantised by itself when it is stored, so that what is read does not depend on which
tokens were computed together: chunks, trees and plain decoding see the same cache. Reading gives
the numbers back in the model's dtype; attention itself knows nothing of it. Moved tokens take their
scales along.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from specrag_inference.cache.compact_view import CompactView

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specrag_inference.attention.step import Segment
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.engine_config import KvCacheDtype

SCALE_BYTES: Final = 4
"""Of the scale that each token has for each head, of keys and of values."""

_LARGEST_INT8: Final = 127.0
_LARGEST_FP8: Final = 448.0


class QuantizedStorage:
    """Eight-bit codes and float32 scales, both in the layout of another storage.

    Attributes:
        block_size: slots a block.
        num_blocks: blocks.
        dtype: of what is written and read.
        device: where the memory is.
        codes: the numbers, one byte each.
        scales: one number for each token and head, laid out as numbers of head size 1.
    """

    def __init__(
        self,
        layout: Callable[..., Any],
        kind: KvCacheDtype,
        *,
        head_dim: int,
        dtype: torch.dtype,
        **sizes: Any,
    ) -> None:
        self.codes = layout(head_dim=head_dim, dtype=torch.int8, **sizes)
        self.scales = layout(head_dim=1, dtype=torch.float32, **sizes)
        self.block_size: int = self.codes.block_size
        self.num_blocks: int = self.codes.num_blocks
        self.dtype = dtype
        self.device: torch.device = self.codes.device
        self._quantize, self._decode = _CODINGS[kind]

    def write(
        self, layer_idx: int, slots: torch.Tensor | slice, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store keys and values [.., head_dim]; each row gets a scale of its own."""
        key_codes, key_scales = self._quantize(keys.float())
        value_codes, value_scales = self._quantize(values.float())
        self.codes.write(layer_idx, slots, key_codes, value_codes)
        self.scales.write(layer_idx, slots, key_scales, value_scales)

    def read(
        self, layer_idx: int, runs: Sequence[tuple[int, int]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of slot ranges in order, in the layout of the memory."""
        keys, values = self.codes.read(layer_idx, runs)
        key_scales, value_scales = self.scales.read(layer_idx, runs)
        return self._restore(keys, key_scales), self._restore(values, value_scales)

    def gather(self, layer_idx: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of single slots; for layouts that can give a layer's whole memory."""
        codes, scales = self.codes.view_all(layer_idx), self.scales.view_all(layer_idx)
        keys, values = (
            self._restore(part[:, slots], scale[:, slots])
            for part, scale in zip(codes, scales, strict=True)
        )
        return keys, values

    def view_pass(self, segments: tuple[Segment, ...]) -> CompactView:
        """Return the blocks of these sequences as if they were all there is."""
        return CompactView(self, segments)

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Copy whole tokens in all layers, scales included."""
        self.codes.copy_slots(source, destination)
        self.scales.copy_slots(source, destination)

    def clear(self) -> None:
        """Make all memory finite."""
        self.codes.clear()
        self.scales.clear()

    def _restore(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (self._decode(codes) * scales).to(self.dtype)


def _quantize_int8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 codes and float32 scales [.., 1]; not finite numbers give scales that are not."""
    scales = numbers.abs().amax(dim=-1, keepdim=True) / _LARGEST_INT8
    return (numbers / _avoid_zero(scales)).round_().to(torch.int8), scales


def _quantize_fp8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_quantize_int8`; codes are e4m3 numbers, kept as bytes."""
    scales = numbers.abs().amax(dim=-1, keepdim=True) / _LARGEST_FP8
    codes = (numbers / _avoid_zero(scales)).to(torch.float8_e4m3fn)
    return codes.view(torch.int8), scales


def _avoid_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1.0, scales)


def _decode_int8(codes: torch.Tensor) -> torch.Tensor:
    return codes.float()


def _decode_fp8(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.float8_e4m3fn).float()


_CODINGS: Final[
    dict[
        str,
        tuple[
            Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
            Callable[[torch.Tensor], torch.Tensor],
        ],
    ]
] = {"int8": (_quantize_int8, _decode_int8), "fp8_e4m3": (_quantize_fp8, _decode_fp8)}
