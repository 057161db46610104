"""Where the converted form of a GGUF file lies; torch-free, so that any process can look."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.models.fingerprint import file_digest

if TYPE_CHECKING:
    from pathlib import Path

_FORMAT = "1"
"""Part of the folder's name; raised when what is written changes."""


def get_converted_folder(path: Path, cache_dir: Path) -> Path:
    """Return the folder of the converted ``path``; it exists only once it is whole.

    Reads the file once for its digest.
    """
    return cache_dir / f"{path.stem}-{file_digest(path)[:16]}-v{_FORMAT}"
