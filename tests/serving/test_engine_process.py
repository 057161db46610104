from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.errors import (
    AlreadyExists,
    Capacity,
    DeadlineExceeded,
    InvalidRequest,
    ModelFailure,
    SpecragError,
)
from specrag_inference.messages import SequenceFailed
from specrag_inference.models.loading import load_model
from specrag_inference.planned import count_token_bytes
from specrag_serving.engine_host import to_error
from specrag_serving.live_answers import LiveAnswers
from specrag_serving.model_files import find_folder, read_model_files
from specrag_serving.testing import save_sharp_model
from transformers import AutoConfig

if TYPE_CHECKING:
    from pathlib import Path

TORCH_FREE = """
import sys
import specrag_verifier.hosting, specrag_drafter.hosting
print(sorted(name for name in ("torch", "transformers") if name in sys.modules))
"""


def test_grpc_processes_load_neither_torch_nor_transformers() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TORCH_FREE], capture_output=True, text=True, check=True
    )

    assert run.stdout.strip() == "[]"


def test_model_files_agree_with_the_loaded_model(tmp_path: Path) -> None:
    folder = save_sharp_model(tmp_path / "m")
    files = read_model_files(str(folder), find_folder(str(folder), tmp_path))
    loaded = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)

    assert files.revision == loaded.revision
    assert files.max_model_len == loaded.max_model_len
    assert set(files.eos_token_ids) == loaded.eos_token_ids
    assert count_token_bytes(config, 4) == (
        2 * loaded.num_layers * loaded.num_kv_heads * loaded.head_dim * 4
    )


def test_folder_without_a_tokenizer_is_a_named_failure(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ModelFailure, match=r"tokenizer\.json is missing"):
        read_model_files("some-model", tmp_path)


def test_reference_that_names_nothing_is_a_named_failure(tmp_path: Path) -> None:
    with pytest.raises(ModelFailure, match="no installed package") as caught:
        find_folder("package:no_such_package/x.gguf", tmp_path)

    assert caught.value.reason == "MODEL_NOT_FOUND"


def test_answer_can_be_claimed_again_once_it_was_given_back() -> None:
    live = LiveAnswers()

    with live.claim("a", "answer 'a'"):
        with live.claim("b", "answer 'b'"):
            pass
        with (
            pytest.raises(AlreadyExists, match="answer 'a' is live"),
            live.claim("a", "answer 'a'"),
        ):
            pass
    with live.claim("a", "answer 'a'"):
        pass


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("CAPACITY", Capacity),
        ("OVERLOADED", Capacity),
        ("DEADLINE", DeadlineExceeded),
        ("INVALID", InvalidRequest),
        ("NUMERICS", ModelFailure),
        ("ANYTHING_ELSE", ModelFailure),
    ],
)
def test_failed_sequence_is_a_clear_error(code: str, error: type[SpecragError]) -> None:
    found = to_error(SequenceFailed(sequence_id="s", code=code, message="what and the limit"))

    assert type(found) is error
    assert "what and the limit" in found.message
