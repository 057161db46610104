"""One-time conversion of a GGUF file into a folder that loads fast.

Reading a GGUF costs many seconds, most of them for de-quantising weights and rebuilding the
tokenizer; the converted folder loads in about one. Several processes may ask at once: a file lock
lets one convert while the others wait, and the finished folder appears by one rename.
"""

from __future__ import annotations

import contextlib
import io
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from specrag_inference.models.converted import get_converted_folder
from specrag_inference.models.quiet import quiet_transformers


def convert_gguf(path: Path, cache_dir: Path) -> Path:
    """Return the folder under ``cache_dir`` with the converted model, converting it if missing.

    Weights are saved in bf16, the tokenizer with its chat template beside them.
    """
    cache_dir.mkdir(parents=True, exist_ok=True)
    folder = get_converted_folder(path, cache_dir)
    if folder.is_dir():
        return folder
    with FileLock(cache_dir / f"{folder.name}.lock"):
        if not folder.is_dir():
            work = Path(tempfile.mkdtemp(prefix=".converting-", dir=cache_dir))
            try:
                _write_folder(path, work)
                work.chmod(0o755)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return folder


def _write_folder(path: Path, folder: Path) -> None:
    # The reader draws its progress bar itself, whatever transformers' own switch says.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        _forget_quantization(model)
        model.config._name_or_path = path.stem
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _forget_quantization(model: torch.nn.Module) -> None:
    """Drop the marks that make saving refuse; the weights are plain tensors by now."""
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
