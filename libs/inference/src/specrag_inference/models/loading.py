"""Loads a model and its tokenizer by reference, ready for the block cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed.configuration_utils import DistributedConfig

from specrag_inference.attention.backends import ATTENTION_NAME, register_attention
from specrag_inference.models.fingerprint import weights_fingerprint
from specrag_inference.models.gguf_conversion import convert_gguf
from specrag_inference.models.quantization import quantize_model
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.models.reference import HubModel, ModelReferenceError, resolve_reference
from specrag_inference.models.supported import check_supported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from specrag_inference.plan import DtypeName, QuantizationName

_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, and the facts about it that cache, attention and handshake need.

    Attributes:
        module: the transformers model, in evaluation mode, attached to block attention.
        num_layers: decoder layers.
        num_heads: query heads of this rank.
        num_kv_heads: key heads of this rank.
        head_dim: numbers a head.
        vocab_size: rows of the output layer, padding included.
        max_model_len: longest sequence in tokens.
        eos_token_ids: ids that end an answer.
        dtype: of weights and cache.
        device: where both are.
        model_id: short name.
        revision: fingerprint of config and weight files.
    """

    module: PreTrainedModel
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    model_id: str
    revision: str


def load_model(
    reference: str,
    *,
    dtype: DtypeName = "auto",
    cache_dir: Path,
    num_threads: int | None = None,
    tp_size: int = 1,
    quantization: QuantizationName = "none",
) -> LoadedModel:
    """Load the model that ``reference`` names.

    Args:
        reference: see :mod:`specrag_inference.models.reference`.
        dtype: ``auto`` is bf16 where the hardware computes in it, fp32 elsewhere.
        cache_dir: where converted GGUF files are kept.
        num_threads: torch threads of this process; ``None`` leaves them as they are.
        tp_size: ranks that share the model; above 1 this process is one of them, in the process
            group, and loads its share.
        quantization: of the decoder's linear weights.

    Raises:
        ModelReferenceError: the reference names nothing.
        QuantizationError: this machine cannot quantise so.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    model_id, folder = load_folder(reference, cache_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    register_attention()
    with quiet_transformers():
        module = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=resolve_dtype(dtype, device),
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            distributed_config=DistributedConfig(tp_size=tp_size) if tp_size > 1 else None,
        )
    if tp_size == 1:
        torch.nn.Module.to(module, device)
        quantize_model(module, quantization)
    revision = weights_fingerprint(folder)
    return describe_model(module, model_id=model_id, revision=revision, tp_size=tp_size)


def load_tokenizer(reference: str, cache_dir: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer that ``reference`` names, chat template included.

    Raises:
        ModelReferenceError: the reference names nothing.
    """
    _, folder = load_folder(reference, cache_dir)
    with quiet_transformers():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            folder, local_files_only=True
        )
    return tokenizer


def load_folder(reference: str, cache_dir: Path) -> tuple[str, Path]:
    """Return model id and local folder of a reference, converting or downloading when needed."""
    source = resolve_reference(reference)
    if isinstance(source, HubModel):
        return source.model_id, _download(source.model_id)
    if source.is_gguf:
        return source.model_id, convert_gguf(source.path, cache_dir)
    return source.model_id, source.path


def _download(model_id: str) -> Path:
    try:
        return Path(snapshot_download(model_id, allow_patterns=_HUB_FILES))
    except OSError as error:
        raise ModelReferenceError(
            f"model '{model_id}' is no local path and cannot be fetched from the hub: {error}"
        ) from error


def resolve_dtype(name: DtypeName, device: torch.device) -> torch.dtype:
    """Return the torch dtype; ``auto`` asks the hardware."""
    if name == "fp32":
        return torch.float32
    if name == "bf16" or device.type == "cuda":
        return torch.bfloat16
    features = torch.cpu.get_capabilities()
    computes_bf16 = features.get("avx512_bf16") or features.get("amx_bf16")
    return torch.bfloat16 if computes_bf16 else torch.float32


def describe_model(
    module: PreTrainedModel, *, model_id: str, revision: str, tp_size: int = 1
) -> LoadedModel:
    """Wrap a transformers model that is already attached to block attention.

    Raises:
        UnsupportedModelError: block attention would serve it wrongly.
    """
    check_supported(module)
    config = module.config.get_text_config()
    module.eval()  # type: ignore[no-untyped-call]
    module.requires_grad_(requires_grad=False)
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return LoadedModel(
        module=module,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads // tp_size,
        num_kv_heads=num_kv_heads // tp_size,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=_collect_eos(module),
        dtype=module.dtype,
        device=module.device,
        model_id=model_id,
        revision=revision,
    )


def _collect_eos(module: PreTrainedModel) -> frozenset[int]:
    found: set[int] = set()
    for source in (module.config.get_text_config(), module.generation_config):
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
    return frozenset(found)
