"""Smaller weights: what is quantised, what it costs in memory, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine
from specrag_inference.engine_config import EngineConfig
from specrag_inference.messages import (
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.models.loading import load_model
from specrag_inference.models.quantization import (
    QuantizationError,
    check_quantization,
    count_weight_bytes,
)
from specrag_inference.testing import build_byte_tokenizer, build_tree, drain, save_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from specrag_inference.plan import QuantizationName
    from specrag_inference.testing import Family

KEY = bytes(range(16))
COUPLED = VerificationMode.COUPLED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), seed=1)


def build_engine(folder: Path, quantization: QuantizationName) -> Engine:
    model = load_model(str(folder), dtype="fp32", cache_dir=folder, quantization=quantization)
    return Engine(model, build_byte_tokenizer(), EngineConfig(num_blocks=64))


def open_coupled(engine: Engine, max_tokens: int) -> None:
    engine.submit(
        OpenSequence(
            sequence_id="a",
            prompt_token_ids=tuple(b"what is said"),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=1.0),
            mode=COUPLED,
            random_key=KEY,
        )
    )
    drain(engine)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_int8_keeps_embeddings_and_output_layer_and_shrinks_the_rest(
    tmp_path: Path, family: Family
) -> None:
    folder = save_tiny_model(tmp_path, family)
    plain = load_model(str(folder), dtype="fp32", cache_dir=tmp_path).module
    small = load_model(str(folder), dtype="fp32", cache_dir=tmp_path, quantization="int8").module
    kept = {"model.embed_tokens.weight", "lm_head.weight"}
    weights = dict(small.named_parameters())
    for name, weight in plain.named_parameters():
        is_quantised = weight.ndim == 2 and name not in kept
        assert (type(weights[name]) is not torch.nn.Parameter) == is_quantised, name
    whole = sum(weight.nbytes for weight in plain.parameters())
    linear = sum(w.nbytes for n, w in plain.named_parameters() if w.ndim == 2 and n not in kept)
    assert count_weight_bytes(plain) == whole
    assert count_weight_bytes(small) < whole - 0.6 * linear


def test_int8_logits_stay_close_to_the_unquantised(folder: Path) -> None:
    ids = torch.tensor([list(b"some text to be read")])
    plain = load_model(str(folder), dtype="fp32", cache_dir=folder)
    small = load_model(str(folder), dtype="fp32", cache_dir=folder, quantization="int8")
    for model in (plain, small):
        model.module.set_attn_implementation("eager")
    with torch.inference_mode():
        expected, found = (model.module(ids).logits.double() for model in (plain, small))
    cosine = torch.nn.functional.cosine_similarity(expected, found, dim=-1)
    assert float(cosine.min()) > 0.99


def test_int8_drafter_changes_no_token_of_a_coupled_answer(folder: Path) -> None:
    target = build_engine(folder, "none")
    open_coupled(target, 60)
    target.submit(VerifyTree(sequence_id="a", round=0, tree=TokenTree.empty(), free_run_tokens=59))
    alone = [t.token_id for e in drain(target) if isinstance(e, RoundVerified) for t in e.tokens]
    joint, num_accepted = decode_jointly(
        build_engine(folder, "none"), build_engine(folder, "int8"), 60
    )
    assert joint == alone
    assert num_accepted > 10


def decode_jointly(target: Engine, drafter: Engine, max_tokens: int) -> tuple[list[int], int]:
    """Return the tokens of an answer that the drafter proposes four at a time, and the accepted."""
    open_coupled(target, max_tokens)
    open_coupled(drafter, max_tokens)
    tokens: list[int] = []
    committed: tuple[int, ...] = ()
    num_accepted = 0
    for round_ in range(max_tokens):
        drafter.submit(
            ProposeTokens(sequence_id="a", round=round_, committed_token_ids=committed, gamma=4)
        )
        (proposed,) = (e for e in drain(drafter) if isinstance(e, TokensProposed))
        assert all(branch.source is DraftSource.MODEL for branch in proposed.branches)
        tree = build_tree([(0, list(proposed.branches))])
        target.submit(VerifyTree(sequence_id="a", round=round_, tree=tree))
        (verified,) = (e for e in drain(target) if isinstance(e, RoundVerified))
        committed = tuple(token.token_id for token in verified.tokens)
        num_accepted += sum(token.node_idx is not None for token in verified.tokens)
        tokens += committed
        if verified.finish_reason is not None:
            break
    return tokens, num_accepted


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_fp8_without_a_gpu_is_refused_with_the_way_out(folder: Path) -> None:
    with pytest.raises(QuantizationError) as caught:
        load_model(str(folder), cache_dir=folder, quantization="fp8")
    assert str(caught.value) == (
        "quantization=fp8 needs a GPU of compute capability 8.9 or newer, this machine has none; "
        "use int8 or none"
    )


def test_quantised_weights_over_several_ranks_are_refused() -> None:
    check_quantization("none", tp_size=2)
    with pytest.raises(QuantizationError, match="does not go with tp_size=2"):
        check_quantization("int8", tp_size=2)
