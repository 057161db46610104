"""A model as its folder describes it: tokenizer, context, ends. Read without loading torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from specrag_common.runtime.errors import ModelFailure
from specrag_inference.models.converted import get_converted_folder
from specrag_inference.models.fingerprint import weights_fingerprint
from specrag_inference.models.reference import (
    HubModel,
    ModelReferenceError,
    resolve_reference,
)
from specrag_inference.prompts import ChatTemplateError, ChatTokenizer

_DESCRIPTION_FILES: Final = ["*.json", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """What the gRPC process knows about its model.

    Attributes:
        model_id: the reference as configured.
        revision: identifies config and weights.
        tokenizer: with its chat template.
        max_model_len: longest sequence in tokens.
        eos_token_ids: ids that end an answer, ascending.
    """

    model_id: str
    revision: str
    tokenizer: ChatTokenizer
    max_model_len: int
    eos_token_ids: tuple[int, ...]


def find_folder(reference: str, cache_dir: Path) -> Path:
    """Return where the model's folder is, or will be once its GGUF file has been converted.

    Raises:
        ModelFailure: the reference names nothing.
    """
    try:
        source = resolve_reference(reference)
    except ModelReferenceError as exc:
        raise ModelFailure(str(exc), reason="MODEL_NOT_FOUND") from exc
    if isinstance(source, HubModel):
        try:
            return Path(snapshot_download(source.model_id, allow_patterns=_DESCRIPTION_FILES))
        except (OSError, ValueError) as exc:
            raise ModelFailure(
                f"model '{reference}' cannot be fetched: {exc}", reason="MODEL_NOT_FOUND"
            ) from exc
    return get_converted_folder(source.path, cache_dir) if source.is_gguf else source.path


def read_model_files(reference: str, folder: Path) -> ModelFiles:
    """Read the folder of a model; takes tens of milliseconds for a large tokenizer.

    Raises:
        ModelFailure: a file is missing or the chat template is unusable.
    """
    try:
        tokenizer = ChatTokenizer.from_folder(folder)
        config = _read_json(folder / "config.json")
    except (ChatTemplateError, OSError, ValueError) as exc:
        raise ModelFailure(f"model '{reference}' cannot be read: {exc}") from exc
    text_config = config.get("text_config") or config
    generation = folder / "generation_config.json"
    sources = [text_config, _read_json(generation) if generation.is_file() else {}]
    return ModelFiles(
        model_id=reference,
        revision=weights_fingerprint(folder),
        tokenizer=tokenizer,
        max_model_len=int(text_config["max_position_embeddings"]),
        eos_token_ids=tuple(sorted(set().union(*map(_list_eos, sources)))),
    )


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _list_eos(config: dict[str, Any]) -> set[int]:
    value = config.get("eos_token_id")
    if value is None:
        return set()
    return {value} if isinstance(value, int) else set(value)
