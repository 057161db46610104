"""Settings of a service that hosts an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from pydantic import Field
from specrag_common.runtime.settings import ServiceSettings
from specrag_inference.engine_config import EngineConfig, KvCacheDtype
from specrag_inference.models.reference import BUNDLED_TARGET
from specrag_inference.plan import DtypeName, EnginePlan, QuantizationName
from specrag_inference.prompts.layout import INSTRUCTIONS

_DTYPES: Final[dict[str, DtypeName]] = {"auto": "auto", "bfloat16": "bf16", "float32": "fp32"}


class EngineSettings(ServiceSettings):
    """Model and engine of one replica."""

    model: str = BUNDLED_TARGET
    """Model reference: ``package:<import name>/<path>``, a local folder or ``.gguf`` file, or a hub
    name."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Weights and activations; ``auto`` is bfloat16 where the hardware computes in it."""

    model_cache_dir: Path = Path("~/.cache/specrag/models")
    """Folder that keeps converted GGUF models; ``~`` is the home folder."""

    quantization: QuantizationName = "none"
    """Of the weights: ``int8`` on any machine, ``fp8`` on GPUs that compute in it."""

    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Torch threads of the replica, shared out over its ranks; absent: torch decides."""

    tp_size: int = Field(default=1, ge=1, le=64)
    """Tensor-parallel ranks, each a process with a GPU of its own where there are GPUs; must divide
    the model's key-value heads."""

    kv_cache_mib: int = Field(default=512, ge=1, le=1_048_576)
    """Memory of the block cache in MiB, over all ranks."""

    kv_cache_dtype: KvCacheDtype = "auto"
    """Of keys and values in the block cache; ``int8`` and ``fp8_e4m3`` take half of bfloat16's
    memory and change what the model says."""

    cuda_graphs: bool = False
    """Replay small passes as CUDA graphs; nothing changes on a CPU."""

    system_prompt: str = Field(default=INSTRUCTIONS, min_length=1, max_length=4000)
    """What the model is told in the system role. Drafters draft best with the target's own."""

    def make_plan(self) -> EnginePlan:
        """Return what the engine process is started with."""
        return EnginePlan(
            model=self.model,
            cache_dir=self.model_cache_dir.expanduser(),
            dtype=_DTYPES[self.dtype],
            quantization=self.quantization,
            num_threads=self.num_threads,
            tp_size=self.tp_size,
            kv_cache_mib=self.kv_cache_mib,
            engine=EngineConfig(kv_cache_dtype=self.kv_cache_dtype, cuda_graphs=self.cuda_graphs),
        )
