"""Block attention against transformers' own forward pass, in fp32, at block edges.

The reference is the same weights under transformers' ``eager`` attention, run over each path of the
tree as one plain sequence.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_inference.attention.masks import compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import Segment, StepInputs, TreePart
from specrag_inference.cache.block_pool import BlockPool
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.runner import LogitRows, ModelRunner, TokenVocabulary
from specrag_inference.testing import BYTE_VOCAB_SIZE, Family, build_random_model

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from specrag_inference.models.loading import LoadedModel

pytestmark = pytest.mark.congruence

TOLERANCE = 1e-4
BLOCK_SIZE = 8
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "gemma2")
TREE = np.array([-1, -1, 0, 0, 2, 1, 4, 4], dtype=np.int32)


class Rig:
    """One model on one backend, and its reference."""

    def __init__(self, model: LoadedModel, backend: str, *, fuse: bool) -> None:
        self.reference = copy.deepcopy(model.module)
        self.reference.set_attn_implementation("eager")
        self.pool = BlockPool(64)
        self.runner = ModelRunner(
            model,
            TokenVocabulary.from_ids(range(BYTE_VOCAB_SIZE), model.vocab_size),
            num_blocks=64,
            block_size=BLOCK_SIZE,
            backend=backend,
            fuse=fuse,
        )

    def build_table(self) -> BlockTable:
        return BlockTable(self.pool, self.runner, block_size=BLOCK_SIZE, root_hash=b"root")

    def compute_reference(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Return the logits after the last token."""
        with torch.no_grad():
            logits = self.reference(torch.tensor([token_ids])).logits[0, -1, :BYTE_VOCAB_SIZE]
        return np.asarray(logits.numpy())

    def extend(
        self,
        parts: list[tuple[BlockTable, list[int], NDArray[np.int32], list[int]]],
        *,
        num_resident: int = 0,
    ) -> LogitRows:
        """Run one pass over (table, chain, parents, tokens of the nodes computed now)."""
        segments, tokens, positions, slots = [], [], [], []
        for table, chain, parents, nodes in parts:
            num_keys = table.num_tokens + len(chain) + len(parents)
            table.reserve(num_keys)
            mask = compute_ancestor_mask(parents)
            segment = Segment(
                num_cached=table.num_tokens,
                num_chain=len(chain),
                tree=TreePart(depths=compute_depths(mask), rows=mask[num_resident:]),
                slot_runs=tuple(table.slot_runs(num_keys)),
            )
            segments.append(segment)
            tokens += [*chain, *nodes]
            positions.append(segment.compute_query_positions())
            slots.append(table.slots(num_keys - segment.num_queries, num_keys))
        return self.runner.execute(
            StepInputs(
                token_ids=np.array(tokens, dtype=np.int64),
                position_ids=np.concatenate(positions).astype(np.int64),
                slot_ids=np.concatenate(slots),
                logit_rows=np.arange(len(tokens), dtype=np.int64),
                segments=tuple(segments),
            )
        )


NO_TREE = np.empty(0, dtype=np.int32)


def draw_tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


def list_path(parents: NDArray[np.int32], nodes: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = int(parents[node])
    return path


def assert_close(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    assert np.abs(actual - expected).max() < TOLERANCE


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> LoadedModel:
    return build_random_model(request.param, seed=3)


@pytest.fixture(params=[("dense", False), ("dense", True), ("sdpa", False), ("sdpa", True)])
def rig(model: LoadedModel, request: pytest.FixtureRequest) -> Rig:
    """Every backend under transformers' own layers and under the lean forward pass."""
    backend, fuse = request.param
    return Rig(model, backend, fuse=fuse)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 31, 33])
def test_prefill_in_two_chunks_equals_a_plain_forward(rig: Rig, length: int) -> None:
    tokens = draw_tokens(length, length)
    table = rig.build_table()
    first = length // 2
    if first:
        rig.extend([(table, tokens[:first], NO_TREE, [])])
        table.extend(first)
    rows = rig.extend([(table, tokens[first:], NO_TREE, [])])
    assert_close(rows.row(length - first - 1), rig.compute_reference(tokens))


@pytest.mark.parametrize("length", [1, 6, 7, 8, 15, 16, 17, 30])
def test_every_tree_node_equals_a_plain_forward_over_its_path(rig: Rig, length: int) -> None:
    prompt, nodes = draw_tokens(length, length), draw_tokens(100 + length, len(TREE))
    table = rig.build_table()
    if length > 1:
        rig.extend([(table, prompt[:-1], NO_TREE, [])])
        table.extend(length - 1)
    rows = rig.extend([(table, prompt[-1:], TREE, nodes)])
    assert_close(rows.row(0), rig.compute_reference(prompt))
    for node in range(len(TREE)):
        expected = rig.compute_reference(prompt + list_path(TREE, nodes, node))
        assert_close(rows.row(1 + node), expected)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_accepted_nodes_serve_as_context_after_compaction(rig: Rig, length: int) -> None:
    prompt, nodes = draw_tokens(length, length), draw_tokens(7, len(TREE))
    table = rig.build_table()
    rig.extend([(table, prompt, TREE, nodes)])
    table.extend(length)
    table.accept([0, 2, 4, 7])
    rows = rig.extend([(table, [5], NO_TREE, [])])
    assert_close(rows.row(0), rig.compute_reference([*prompt, *list_path(TREE, nodes, 7), 5]))


def test_nodes_appended_to_a_cached_tree_equal_a_plain_forward(rig: Rig) -> None:
    prompt, nodes = draw_tokens(1, 20), draw_tokens(2, len(TREE))
    table = rig.build_table()
    rig.extend([(table, prompt, TREE[:4], nodes[:4])])
    table.extend(len(prompt))
    rows = rig.extend([(table, [], TREE, nodes[4:])], num_resident=4)
    for node in range(4, len(TREE)):
        expected = rig.compute_reference(prompt + list_path(TREE, nodes, node))
        assert_close(rows.row(node - 4), expected)


def test_sequences_in_one_pass_do_not_see_each_other(rig: Rig) -> None:
    prompts = [draw_tokens(seed, length) for seed, length in ((1, 5), (2, 26), (3, 16))]
    nodes = draw_tokens(9, len(TREE))
    parts = [(rig.build_table(), prompt, TREE, nodes) for prompt in prompts]
    rows = rig.extend(parts)
    start = 0
    for prompt in prompts:
        start += len(prompt)
        for node in range(len(TREE)):
            expected = rig.compute_reference(prompt + list_path(TREE, nodes, node))
            assert_close(rows.row(start + node), expected)
        start += len(TREE)


def test_scattered_blocks_equal_consecutive_ones(rig: Rig) -> None:
    tokens = draw_tokens(4, 40)
    table, other = rig.build_table(), rig.build_table()
    for start in range(0, 40, 8):
        rig.extend([(table, tokens[start : start + 8], NO_TREE, [])])
        table.extend(8)
        other.reserve(8 * (start // 8 + 1))
        other.extend(8)
    assert len(table.slot_runs(40)) > 1
    rows = rig.extend([(table, [3], TREE, draw_tokens(5, len(TREE)))])
    assert_close(rows.row(0), rig.compute_reference([*tokens, 3]))
