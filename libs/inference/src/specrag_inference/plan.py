"""What an engine process is to load: plain values, readable without loading torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from specrag_inference.engine_config import EngineConfig

if TYPE_CHECKING:
    from pathlib import Path

DtypeName = Literal["auto", "bf16", "fp32"]
"""Weights and activations; ``auto`` is bf16 where the hardware computes in it, else fp32."""

QuantizationName = Literal["none", "int8", "fp8"]
"""Of the decoder's linear weights; see :mod:`specrag_inference.models.quantization`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """One model and its engine, for one replica of one or several ranks.

    Attributes:
        model: model reference; see :mod:`specrag_inference.models.reference`.
        cache_dir: where converted models are kept.
        dtype: weights, activations and cache.
        quantization: of the weights.
        num_threads: torch threads of the whole replica, shared out over its ranks; ``None`` leaves
            torch's own choice.
        tp_size: tensor-parallel ranks, each a process with a device and a share of the heads.
        kv_cache_mib: memory of the block cache over all ranks in MiB; it stands for
            ``engine.num_blocks``. ``None`` keeps that number.
        engine: sizes.
    """

    model: str
    cache_dir: Path
    dtype: DtypeName = "auto"
    quantization: QuantizationName = "none"
    num_threads: int | None = None
    tp_size: int = 1
    kv_cache_mib: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)
