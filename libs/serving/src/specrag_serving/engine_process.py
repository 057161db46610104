"""The engine process: sizes the block cache, then serves. Only the child imports torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What an engine process is to load; plain values that travel to another process.

    Attributes:
        model: model reference.
        cache_dir: where converted models are kept.
        dtype: ``auto``, ``bfloat16`` or ``float32``.
        num_threads: torch threads; ``None``: torch decides.
        kv_cache_mib: memory of the block cache.
    """

    model: str
    cache_dir: Path
    dtype: Literal["auto", "bfloat16", "float32"]
    num_threads: int | None
    kv_cache_mib: int


def run(connection: Connection[Any, Any], plan: EnginePlan) -> None:
    """Load the planned model and serve it over ``connection`` until it closes."""
    import torch  # noqa: PLC0415 - the parent imports this module and must not load torch
    from specrag_inference.engine import EngineConfig  # noqa: PLC0415 - as above
    from specrag_inference.models.loading import load_folder, resolve_dtype  # noqa: PLC0415
    from specrag_inference.serve import EngineProcessSettings, run_engine  # noqa: PLC0415

    short_names: dict[str, Literal["auto", "bf16", "fp32"]] = {
        "auto": "auto",
        "bfloat16": "bf16",
        "float32": "fp32",
    }
    dtype = short_names[plan.dtype]
    _, folder = load_folder(plan.model, plan.cache_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_bytes = count_token_bytes(
        json.loads((folder / "config.json").read_text(encoding="utf-8")),
        resolve_dtype(dtype, device).itemsize,
    )
    block_size = EngineConfig().block_size
    num_blocks = max(1, plan.kv_cache_mib * _MIB // (num_bytes * block_size))
    settings = EngineProcessSettings(
        model=plan.model,
        cache_dir=plan.cache_dir,
        dtype=dtype,
        num_threads=plan.num_threads,
        engine=EngineConfig(num_blocks=num_blocks, block_size=block_size),
    )
    run_engine(connection, settings)


def count_token_bytes(config: dict[str, Any], element_bytes: int) -> int:
    """Return the bytes that keys and values of one token take, by a model's ``config.json``."""
    config = config.get("text_config") or config
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    return int(2 * config["num_hidden_layers"] * num_kv_heads * head_dim * element_bytes)
