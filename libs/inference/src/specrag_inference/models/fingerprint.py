"""Fingerprints that tell whether two sets of weights, or two files, are the same."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HEADER_BYTES = 1 << 16
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12


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
