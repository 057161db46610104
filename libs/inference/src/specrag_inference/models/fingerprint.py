"""Fingerprints that tell whether two tokenizers or two sets of weights are the same."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

_HEADER_BYTES = 1 << 16
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


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
    """Return a hex digest of a model folder: its config, and name, size and samples of each file.

    Cheap: it reads the head of a weight file, which holds names and shapes, and small samples
    spread over the rest, which tell fine-tunes of one shape apart.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("config.json")) + sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            digest.update(file.read(_HEADER_BYTES))
            for sample in range(_NUM_SAMPLES):
                file.seek(size * sample // _NUM_SAMPLES)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def file_digest(path: Path) -> str:
    """Return the hex SHA-256 of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
