"""The flex backend against transformers' own forward, on the CPU in eager and compiled form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_inference.attention.flex import (
    FlexBackend,
    choose_kernel,
    choose_query_block,
    store_finite,
)
from specrag_inference.cache.storage import KvStorage
from specrag_inference.runner import BACKENDS, choose_backend

from tests.inference.models.families import CONFIGS, ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens, list_path

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.congruence

TOLERANCE = 1e-4
DEEP = (-1, 0, 1, 2, 3, 4, 5, 2, 7, 8)
BUSHY = (-1, -1, 0, 0, 2, 1, 4, 4)


@pytest.fixture(scope="module", params=list(CONFIGS))
def reference(request: pytest.FixtureRequest) -> ReferenceModel:
    return ReferenceModel(request.param)


@pytest.fixture(scope="module")
def llama() -> ReferenceModel:
    return ReferenceModel("llama")


def build_storage(block_size: int, num_blocks: int = 8) -> KvStorage:
    return KvStorage(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def run_a_crowd(rig: Rig, reference: ReferenceModel) -> float:
    """Run prefill, decode and trees of four sequences in one pass; return the largest error."""
    prompts = [draw_tokens(seed, length) for seed, length in ((1, 5), (2, 26), (3, 16), (4, 40))]
    nodes = draw_tokens(9, len(DEEP))
    bushes = nodes[: len(BUSHY)]
    shares = [
        Share(table=rig.build_table(), chain=prompts[0]),
        Share(table=rig.prefill(prompts[1][:-1]), chain=prompts[1][-1:]),
        Share(table=rig.prefill(prompts[2], chunk=8), parents=DEEP, nodes=nodes),
        Share(
            table=rig.prefill(prompts[3][:20]), chain=prompts[3][20:], parents=BUSHY, nodes=bushes
        ),
    ]
    rows = rig.run(shares)
    plain = [prompts[0], prompts[1], [], prompts[3]]
    errors = [
        compute_error(reference, tokens, row)
        for tokens, row in zip(plain, (rows[0], rows[1], rows[2][:0], rows[3][:20]), strict=True)
        if tokens
    ]
    errors += compute_path_errors(reference, prompts[2], DEEP, nodes, rows[2])
    errors += compute_path_errors(reference, prompts[3], BUSHY, bushes, rows[3][20:])
    return max(errors)


def compute_error(
    reference: ReferenceModel,
    tokens: list[int],
    rows: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> float:
    expected = reference.compute_logits(tokens).numpy()[-len(rows) :]
    return float(np.abs(rows - expected).max())


def compute_path_errors(
    reference: ReferenceModel,
    prompt: list[int],
    parents: Sequence[int],
    nodes: list[int],
    rows: np.ndarray[tuple[int, int], np.dtype[np.float32]],
) -> list[float]:
    return [
        compute_error(reference, prompt + list_path(parents, nodes, node), rows[node][None])
        for node in range(len(nodes))
    ]


def test_prefill_decode_and_trees_in_one_pass_equal_the_plain_forward(
    reference: ReferenceModel,
) -> None:
    assert run_a_crowd(Rig(reference.loaded, "flex"), reference) < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 4, 64, 256])
def test_block_size_changes_nothing(llama: ReferenceModel, block_size: int) -> None:
    rig = Rig(llama.loaded, "flex", block_size=block_size, num_blocks=1024 // block_size)
    assert run_a_crowd(rig, llama) < TOLERANCE


def test_trees_beyond_one_word_of_bits_equal_the_plain_forward(llama: ReferenceModel) -> None:
    parents = tuple(max(-1, node - 7) for node in range(150))
    prompt, nodes = draw_tokens(1, 9), draw_tokens(2, 150)
    rig = Rig(llama.loaded, "flex")
    share = Share(table=rig.prefill(prompt), parents=parents, nodes=nodes)
    (rows,) = rig.run([share])
    assert max(compute_path_errors(llama, prompt, parents, nodes, rows)) < TOLERANCE


def test_accepted_path_serves_as_context_after_compaction(llama: ReferenceModel) -> None:
    prompt, nodes = draw_tokens(1, 13), draw_tokens(2, len(DEEP))
    rig = Rig(llama.loaded, "flex")
    table = rig.build_table()
    rig.run([Share(table=table, chain=prompt, parents=DEEP, nodes=nodes)])
    table.accept([0, 1, 2, 7, 8])
    (rows,) = rig.run([Share(table=table, chain=[5, 6])])
    tokens = [*prompt, *list_path(DEEP, nodes, 8), 5, 6]
    assert compute_error(llama, tokens, rows) < TOLERANCE


def test_a_value_that_is_not_finite_fails_its_own_sequence_only(llama: ReferenceModel) -> None:
    """Both sequences' blocks lie in one span, and weight zero times NaN would be NaN."""
    rig = Rig(llama.loaded, "flex")
    sick, well = rig.prefill(draw_tokens(1, 12)), rig.prefill(draw_tokens(2, 12))
    poisoned = torch.full((1, 2, 16), float("nan"))
    slots = torch.from_numpy(sick.slots(3, 4))
    store_finite(rig.runner._storage, 0, slots, poisoned.transpose(0, 1), poisoned.transpose(0, 1))
    sick_rows, well_rows = rig.run([Share(table=sick, chain=[5]), Share(table=well, chain=[5])])
    assert np.isnan(sick_rows).all()
    assert compute_error(llama, [*draw_tokens(2, 12), 5], well_rows) < TOLERANCE


def test_block_sizes_that_are_no_power_of_two_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size=12 must be a power of two"):
        FlexBackend(build_storage(12))


def test_memory_nobody_has_written_is_made_finite() -> None:
    storage = build_storage(16)
    storage.data.fill_(float("nan"))
    FlexBackend(storage)
    assert torch.isfinite(storage.data).all()


def test_auto_is_flex_on_a_gpu_and_sdpa_on_a_cpu() -> None:
    assert choose_backend("auto", torch.device("cuda")) == "flex"
    assert choose_backend("auto", torch.device("cpu")) == "sdpa"
    assert choose_backend("dense", torch.device("cuda")) == "dense"
    assert set(BACKENDS) == {"dense", "sdpa", "flex"}


@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rows", [4, 16, 64, 112, 127, 128, 384])
def test_gpu_kernels_get_rows_that_divide_their_line_of_the_mask(
    rows: int, group: int, head_dim: int
) -> None:
    """Both kernels refuse other sizes when they are compiled, which only a GPU would show."""
    line = choose_query_block(rows, group)
    options = choose_kernel(rows, group, head_dim, torch.device("cuda"))
    assert line >= rows
    assert line % 128 == 0
    if rows >= 128:
        assert options is None
        return
    assert options is not None
    assert line % options["BLOCK_M"] == 0
    assert options["BLOCK_M"] % group == 0
    assert 16 <= options["BLOCK_M"] <= (64 if head_dim <= 128 else 32)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["llama", "gemma2-narrow", "llama-tied-one-kv-head"])
def test_compiled_kernel_equals_the_plain_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel reads only the spans it is told to, which the eager form does not show."""
    monkeypatch.setitem(BACKENDS, "flex", lambda storage: FlexBackend(storage, compiles=True))
    model = ReferenceModel(name)
    rig = Rig(model.loaded, "flex", num_blocks=96)
    assert run_a_crowd(rig, model) < TOLERANCE
