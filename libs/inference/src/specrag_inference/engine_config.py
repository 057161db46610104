"""Sizes of an engine: plain values, readable without loading torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KvCacheDtype = Literal["auto", "int8", "fp8_e4m3"]
"""Of keys and values in the cache; ``auto`` is the model's own dtype, exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine.

    Attributes:
        num_blocks: cache blocks.
        block_size: tokens a block.
        max_step_tokens: most tokens of one forward pass; also the largest prefill chunk.
        max_shared_prefill_tokens: most prefill tokens of a pass shared with running sequences.
        max_sequences: most sequences open at once; further ones wait.
        max_waiting: most sequences that wait; further ones are refused.
        backend: attention backend, ``dense``, ``sdpa`` or ``flex``; ``auto`` is ``flex`` on a GPU
            and ``sdpa`` on a CPU.
        cuda_graphs: replay small passes as CUDA graphs; takes effect with the flex backend.
        kv_cache_dtype: of keys and values in the cache. ``int8`` and ``fp8_e4m3`` halve its memory
            and make it coarser: the target is then the model with that cache.
    """

    num_blocks: int = 1024
    block_size: int = 16
    max_step_tokens: int = 512
    max_shared_prefill_tokens: int = 128
    max_sequences: int = 64
    max_waiting: int = 256
    backend: str = "auto"
    cuda_graphs: bool = False
    kv_cache_dtype: KvCacheDtype = "auto"
