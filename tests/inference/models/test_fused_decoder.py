"""Which models take the lean forward pass, and what it keeps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from specrag_inference.models.fused_decoder import fuse_decoder
from specrag_inference.models.fused_linear import fuse_linears
from specrag_inference.models.quantization import quantize_model
from specrag_inference.testing import build_random_model

from tests.inference.models.families import CONFIGS, ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens

BF16_STEP = 2**-8


@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_tested_family_is_fused(family: str) -> None:
    assert fuse_decoder(ReferenceModel(family).loaded.module) is not None


def test_model_with_a_hook_inside_a_layer_runs_through_transformers() -> None:
    module: Any = build_random_model().module
    module.base_model.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert fuse_decoder(module) is None


def test_model_with_an_extra_part_in_a_layer_runs_through_transformers() -> None:
    module: Any = build_random_model().module
    module.base_model.layers[1].self_attn.gate = torch.nn.Linear(2, 2)
    assert fuse_decoder(module) is None


def test_hook_on_a_linear_layer_is_called() -> None:
    layers = [torch.nn.Linear(8, 4, bias=False) for _ in range(2)]
    layers[0].register_forward_hook(lambda _module, _inputs, output: output + 1)
    rows = torch.randn(3, 8)
    expected = torch.cat([layer(rows) for layer in layers], dim=-1)
    assert torch.equal(fuse_linears(*layers)(rows), expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_fused_linears_equal_the_layers_side_by_side(has_bias: bool) -> None:
    layers = [torch.nn.Linear(8, size, bias=has_bias) for size in (4, 6, 2)]
    rows = torch.randn(3, 8)
    expected = torch.cat([layer(rows) for layer in layers], dim=-1)
    torch.testing.assert_close(fuse_linears(*layers)(rows), expected)


def test_exact_product_of_a_bf16_layer_is_not_rounded_to_bf16() -> None:
    layer = torch.nn.Linear(64, 32, bias=False).bfloat16()
    rows = torch.randn(5, 64).bfloat16()
    expected = rows.double() @ layer.weight.double().t()
    exact = fuse_linears(layer).compute_exact(rows)
    assert exact.dtype == torch.float32
    rounding = (expected.bfloat16() - expected).abs().max()
    assert (exact - expected).abs().max() < rounding * BF16_STEP * 4


@pytest.mark.parametrize("num_new", [1, 9])
def test_quantized_layers_keep_their_own_arithmetic(num_new: int) -> None:
    model = build_random_model("qwen3", seed=4)
    exact = copy.deepcopy(model.module)
    quantize_model(model.module, "int8")
    rig = Rig(model, "sdpa", block_size=8)
    tokens = draw_tokens(1, 20 + num_new)
    table = rig.prefill(tokens[:20])
    actual = torch.from_numpy(rig.run([Share(table=table, chain=tokens[20:])])[0][-1])
    reference = copy.deepcopy(model.module)
    for module in (reference, exact):
        module.set_attn_implementation("eager")
    with torch.no_grad():
        wanted, unquantized = (
            module(torch.tensor([tokens])).logits[0, -1, : len(actual)]
            for module in (reference, exact)
        )
    assert (actual - wanted).abs().max() < 1e-4
    assert (actual - unquantized).abs().max() > 1e-3
