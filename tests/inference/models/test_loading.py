"""Loading by reference, fingerprints, and the bundled model's conversion."""

from __future__ import annotations

import multiprocessing
import shutil
import time
from typing import TYPE_CHECKING

import pytest
import torch
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import (
    FinishReason,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    VerifyTree,
)
from specrag_inference.models.fingerprint import weights_fingerprint
from specrag_inference.models.loading import load_folder, load_model, load_tokenizer, resolve_dtype
from specrag_inference.models.reference import BUNDLED_TARGET
from specrag_inference.testing import (
    Family,
    build_random_model,
    drain,
    save_tiny_model,
)

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "naïve ⟨日本語⟩ 🙂 <|im_end|>"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_saved_tiny_model_loads_with_the_same_weights_and_facts(
    tmp_path: Path, family: Family
) -> None:
    folder = save_tiny_model(tmp_path / family, family, seed=5)
    loaded = load_model(str(folder), dtype="fp32", cache_dir=tmp_path)
    built = build_random_model(family, seed=5)
    assert loaded.dtype is torch.float32
    assert (loaded.num_layers, loaded.num_heads, loaded.num_kv_heads) == (2, 6, 2)
    assert (loaded.head_dim, loaded.vocab_size, loaded.max_model_len) == (16, 264, 1024)
    assert loaded.eos_token_ids == {258}
    assert loaded.model_id == family
    for name, weight in built.module.state_dict().items():
        assert torch.equal(loaded.module.state_dict()[name], weight)


def test_byte_tokenizer_maps_bytes_to_their_own_ids_and_back(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), tmp_path)
    assert tokenizer.encode("é") == list("é".encode())
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [256, 257, 258]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    ) == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_weights_fingerprint_follows_config_shapes_and_weights(tmp_path: Path) -> None:
    one = save_tiny_model(tmp_path / "one")
    copy = tmp_path / "copy"
    shutil.copytree(one, copy)
    assert weights_fingerprint(copy) == weights_fingerprint(one)
    others: list[tuple[Family, int]] = [("qwen3", 0), ("llama", 1)]
    for family, seed in others:
        other = save_tiny_model(tmp_path / f"{family}{seed}", family, seed=seed)
        assert weights_fingerprint(other) != weights_fingerprint(one)


def test_auto_dtype_is_bf16_only_where_the_processor_computes_in_it() -> None:
    features = torch.cpu.get_capabilities()
    has_bf16 = bool(features.get("avx512_bf16") or features.get("amx_bf16"))
    cpu = torch.device("cpu")
    assert (resolve_dtype("auto", cpu) is torch.bfloat16) == has_bf16
    assert resolve_dtype("fp32", cpu) is torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) is torch.bfloat16


@pytest.mark.slow
def test_bundled_model_is_converted_once_by_racing_processes_and_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(load_folder, [(BUNDLED_TARGET, tmp_path)] * 2)
    (folder,) = {path for _, path in found}
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([folder.name, f"{folder.name}.lock"])
    assert capfd.readouterr().err == ""
    started = time.perf_counter()
    tokenizer = load_tokenizer(BUNDLED_TARGET, tmp_path)
    model = load_model(BUNDLED_TARGET, cache_dir=tmp_path)
    assert time.perf_counter() - started < 10
    assert model.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    engine = Engine(model, tokenizer, EngineConfig(num_blocks=32))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.encode(str(text))
    engine.submit(
        OpenSequence(
            sequence_id="a",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=40),
        )
    )
    drain(engine)
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=TokenTree.empty(), free_run_tokens=39))
    rounds = [event for event in drain(engine) if isinstance(event, RoundVerified)]
    answer = tokenizer.decode([token.token_id for event in rounds for token in event.tokens])
    assert "Paris" in answer
    assert rounds[-1].finish_reason in {FinishReason.STOP_TOKEN, FinishReason.LENGTH}
