"""Forward passes over chains and token trees through a :class:`ModelRunner`, step by step.

The harness speaks the runner's public seam only: block tables, ``StepInputs`` in, logits out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_inference.attention.masks import compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import Segment, StepInputs, TreePart
from specrag_inference.cache.block_pool import BlockPool
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.runner import ModelRunner, TokenVocabulary
from specrag_inference.testing import BYTE_VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from specrag_inference.engine_config import KvCacheDtype
    from specrag_inference.models.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One sequence's part of a pass.

    Attributes:
        table: its blocks.
        chain: committed tokens to compute.
        parents: parent of every tree node, -1 for the first level.
        nodes: tokens of all tree nodes.
        num_resident: how many of the nodes an earlier pass has computed.
    """

    table: BlockTable
    chain: Sequence[int] = ()
    parents: Sequence[int] = ()
    nodes: Sequence[int] = ()
    num_resident: int = 0


class Rig:
    """A runner with blocks of its own."""

    def __init__(
        self,
        model: LoadedModel,
        backend: str,
        *,
        block_size: int = 8,
        num_blocks: int = 64,
        vocab_size: int = BYTE_VOCAB_SIZE,
        cuda_graphs: bool = False,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        self._block_size = block_size
        self._pool = BlockPool(num_blocks)
        self.runner = ModelRunner(
            model,
            TokenVocabulary.from_ids(range(vocab_size), model.vocab_size),
            num_blocks=num_blocks,
            block_size=block_size,
            backend=backend,
            cuda_graphs=cuda_graphs,
            kv_cache_dtype=kv_cache_dtype,
        )

    def build_table(self) -> BlockTable:
        """Return an empty table."""
        return BlockTable(self._pool, self.runner, block_size=self._block_size, root_hash=b"root")

    def run(self, shares: Sequence[Share]) -> list[NDArray[np.float32]]:
        """Run one pass; return [num_queries, vocab_size] logits for each share.

        Chains are committed; nodes stay scratch behind them.
        """
        step = lay_out(shares)
        rows = self.runner.execute(step)
        results = []
        start = 0
        for share, segment in zip(shares, step.segments, strict=True):
            share.table.extend(len(share.chain))
            stop = start + segment.num_queries
            results.append(np.stack([rows.row(index) for index in range(start, stop)]))
            start = stop
        return results

    def prefill(self, tokens: Sequence[int], *, chunk: int | None = None) -> BlockTable:
        """Return a table with the tokens in the cache."""
        table = self.build_table()
        step = chunk or max(1, len(tokens))
        for start in range(0, len(tokens), step):
            self.run([Share(table=table, chain=tokens[start : start + step])])
        return table


def lay_out(shares: Sequence[Share]) -> StepInputs:
    segments, tokens, positions, slots = [], [], [], []
    for share in shares:
        table = share.table
        num_keys = table.num_tokens + len(share.chain) + len(share.parents)
        table.reserve(num_keys)
        segment = Segment(
            num_cached=table.num_tokens,
            num_chain=len(share.chain),
            tree=_build_tree(share),
            slot_runs=tuple(table.slot_runs(num_keys)),
        )
        segments.append(segment)
        tokens += [*share.chain, *share.nodes[share.num_resident :]]
        positions.append(segment.compute_query_positions())
        slots.append(table.slots(num_keys - segment.num_queries, num_keys))
    return StepInputs(
        token_ids=np.array(tokens, dtype=np.int64),
        position_ids=np.concatenate(positions).astype(np.int64),
        slot_ids=np.concatenate(slots),
        logit_rows=np.arange(len(tokens), dtype=np.int64),
        segments=tuple(segments),
    )


def _build_tree(share: Share) -> TreePart | None:
    if not share.parents:
        return None
    mask = compute_ancestor_mask(np.asarray(share.parents, dtype=np.int32))
    return TreePart(depths=compute_depths(mask), rows=mask[share.num_resident :])


def draw_tokens(seed: int, count: int) -> list[int]:
    """Return random byte tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, 256, count)]


def list_path(parents: Sequence[int], nodes: Sequence[int], node: int) -> list[int]:
    """Return the tokens from the first level down to ``node``."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = parents[node]
    return path
