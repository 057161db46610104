"""What a model reference names, and what is said when it names nothing."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from specrag_inference.models.reference import (
    HubModel,
    LocalModel,
    ModelReferenceError,
    resolve_reference,
)

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that cannot be imported, with a GGUF file in it."""
    folder = tmp_path / "carrier"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (folder / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_file_in_a_package_is_found_without_importing_the_package(package: Path) -> None:
    source = resolve_reference("package:carrier/tiny.gguf")
    assert source == LocalModel(model_id="tiny", path=package / "tiny.gguf")
    assert source.is_gguf
    assert "carrier" not in sys.modules


def test_folder_with_a_config_is_a_local_model(tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    source = resolve_reference(str(folder))
    assert source == LocalModel(model_id="some-model", path=folder)
    assert not source.is_gguf


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B-Instruct"])
def test_owner_and_name_is_a_hub_model(name: str) -> None:
    assert resolve_reference(name) == HubModel(model_id=name)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("package:no_such_package/a.gguf", "no installed package has the import name"),
        ("package:carrier/other.gguf", "does not exist"),
        ("package:carrier", "neither a folder with config.json nor a .gguf file"),
        ("package:", "no installed package"),
        ("/no/such/folder", "no existing path"),
        ("./nowhere", "no existing path"),
        ("three/part/name", "no existing path"),
    ],
)
def test_reference_that_names_nothing_says_what_was_looked_for(
    reference: str, message: str
) -> None:
    with pytest.raises(ModelReferenceError, match=message) as caught:
        resolve_reference(reference)
    assert reference in str(caught.value)
