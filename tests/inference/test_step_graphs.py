"""Filled-up and repeated passes give the logits of plain ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_inference.attention.flex import FlexBackend, FlexPass
from specrag_inference.cache.block_pool import BlockPool
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.cache.storage import KvStorage
from specrag_inference.step_graphs import StepGraphs, fill_up

from tests.inference.models.families import ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens, lay_out, list_path

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from specrag_inference.cache.storage import SlotIds

pytestmark = pytest.mark.congruence

BLOCK_SIZE = 8
NUM_BLOCKS = 63
TREE = (-1, 0, 1, 2, 3, 4, 5, 2, 7, 8)


class GraphRig:
    """A model whose every pass goes through recordings; one block more than the pool has."""

    def __init__(self, reference: ReferenceModel) -> None:
        model = reference.loaded
        self.module = model.module
        self.storage = KvStorage(
            num_layers=model.num_layers,
            num_blocks=NUM_BLOCKS + 1,
            block_size=BLOCK_SIZE,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self.num_forwards = 0
        self.pool = BlockPool(NUM_BLOCKS)
        self.graphs = StepGraphs(
            self._forward,
            FlexBackend(self.storage),
            scratch_slot=NUM_BLOCKS * BLOCK_SIZE,
            device=model.device,
        )

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        self.storage.copy_slots(source, destination)

    def build_table(self) -> BlockTable:
        return BlockTable(self.pool, self, block_size=BLOCK_SIZE, root_hash=b"root")

    @torch.inference_mode()
    def run(self, shares: list[Share]) -> NDArray[np.float32]:
        step = lay_out(shares)
        logits = self.graphs.run(step)[:, :259].clone().numpy()
        for share in shares:
            share.table.extend(len(share.chain))
        return np.asarray(logits)

    def _forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention: FlexPass,
    ) -> torch.Tensor:
        self.num_forwards += 1
        output = self.module(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            logits_to_keep=logit_rows,
            use_cache=False,
            prepared_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits


@pytest.fixture(scope="module", params=["llama", "gemma3-narrow", "gemma2"])
def reference(request: pytest.FixtureRequest) -> ReferenceModel:
    return ReferenceModel(request.param)


def test_decode_steps_equal_the_plain_forward_from_the_first_to_the_replayed(
    reference: ReferenceModel,
) -> None:
    tokens = draw_tokens(3, 40)
    rig = GraphRig(reference)
    table = rig.build_table()
    rows = [rig.run([Share(table=table, chain=tokens[:29])])[-1]]
    rows += [rig.run([Share(table=table, chain=[token])])[0] for token in tokens[29:]]
    expected = reference.compute_logits(tokens).numpy()[28:]
    assert np.abs(np.stack(rows) - expected).max() < 1e-4


def test_replayed_trees_of_several_sequences_equal_the_plain_forward(
    reference: ReferenceModel,
) -> None:
    rig = GraphRig(reference)
    prompts = [draw_tokens(seed, 17 + seed) for seed in range(3)]
    tables = [rig.build_table() for _ in prompts]
    for table, prompt in zip(tables, prompts, strict=True):
        rig.run([Share(table=table, chain=prompt)])
    for round_index in range(4):
        nodes = draw_tokens(50 + round_index, len(TREE))
        shares = [Share(table=table, parents=TREE, nodes=nodes) for table in tables]
        rows = rig.run(shares).reshape(3, len(TREE), -1)
        for index, prompt in enumerate(prompts):
            for node in (0, 6, 9):
                path = prompt + list_path(TREE, nodes, node)
                expected = reference.compute_logits(path).numpy()[-1]
                assert np.abs(rows[index, node] - expected).max() < 1e-4
        tables[0].accept([0, 1])
        prompts[0] = prompts[0] + nodes[:2]


def test_a_runner_with_graphs_gives_the_logits_of_one_without(reference: ReferenceModel) -> None:
    tokens = draw_tokens(4, 30)
    rows = []
    for cuda_graphs in (False, True):
        rig = Rig(reference.loaded, "flex", cuda_graphs=cuda_graphs)
        table = rig.prefill(tokens[:20])
        share = Share(table=table, parents=TREE, nodes=draw_tokens(5, len(TREE)))
        rows.append([rig.run([share])[0] for _ in range(3)])
    assert np.abs(np.array(rows[0]) - np.array(rows[1])).max() < 1e-4


def test_a_shape_is_recorded_at_its_second_pass_and_kept_for_all_later_ones() -> None:
    rig = GraphRig(ReferenceModel("llama"))
    table = rig.build_table()
    counts = []
    for token in draw_tokens(1, 5):
        before = rig.num_forwards
        rig.run([Share(table=table, chain=[token])])
        counts.append(rig.num_forwards - before)
    assert counts == [1, 2, 1, 1, 1]
    assert len(rig.graphs._recorded) == 1


def test_filling_up_keeps_the_tokens_and_writes_only_to_the_scratch_slot() -> None:
    rig = GraphRig(ReferenceModel("llama"))
    step = lay_out([Share(table=rig.build_table(), chain=draw_tokens(1, 5))])
    filled = fill_up(step, scratch_slot=504)
    assert filled.token_ids.tolist() == [*step.token_ids.tolist(), 0, 0, 0]
    assert filled.slot_ids.tolist() == [0, 1, 2, 3, 4, 504, 504, 504]
    assert filled.logit_rows.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert filled.segments is step.segments


def test_long_passes_and_passes_without_logits_are_not_recorded() -> None:
    rig = GraphRig(ReferenceModel("llama"))
    short = lay_out([Share(table=rig.build_table(), chain=draw_tokens(1, 5))])
    long = lay_out([Share(table=rig.build_table(), chain=draw_tokens(1, 257))])
    assert StepGraphs.fits(short)
    assert not StepGraphs.fits(long)
    assert not StepGraphs.fits(replace(short, logit_rows=short.logit_rows[:0]))
