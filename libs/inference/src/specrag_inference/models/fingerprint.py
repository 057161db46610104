"""Fingerprints that tell whether two tokenizers or two sets of weights are the same."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_HEADER_BYTES = 1 << 16


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hex digest of the id <-> token map and the special ids.

    Two models whose tokenizers agree in it can exchange token ids. The padded size of a model's
    vocabulary plays no part.
    """
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    facts = {
        "tokens": by_id,
        "special": sorted(tokenizer.all_special_ids),
        "eos": tokenizer.eos_token_id,
        "bos": tokenizer.bos_token_id,
    }
    return hashlib.sha256(json.dumps(facts, ensure_ascii=True).encode()).hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Return a hex digest of a model folder: its config, and every weight file's name, size, head.

    Cheap: it reads 64 KiB a file, which in a safetensors file holds names, shapes and offsets.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("config.json")) + sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the hex SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
