"""Logits of the same tokens by different batch shapes of the real core."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
from specrag_inference.attention.step import Segment, StepInputs
from specrag_inference.cache.block_pool import BlockPool, compute_root_hash
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.runner import ModelRunner, TokenVocabulary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from specrag_inference.models.loading import LoadedModel
    from transformers import PreTrainedTokenizerBase

PREFILL_CHUNK = 512
BLOCK_SIZE = 16


class ForwardPaths:
    """Computes the logits behind every token of an answer, ``group`` tokens a pass."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        num_blocks: int | None = None,
    ) -> None:
        num_blocks = num_blocks or model.max_model_len // BLOCK_SIZE
        vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), model.vocab_size)
        self._pool = BlockPool(num_blocks)
        self._runner = ModelRunner(
            model, vocabulary, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend="sdpa"
        )

    def compute_logits(
        self, prompt_ids: Sequence[int], answer_ids: Sequence[int], *, group: int
    ) -> NDArray[np.float32]:
        """Return [len(answer_ids) + 1, vocab_size]; row t is what answer token t is chosen from."""
        root = compute_root_hash(cache_scope=b"", model_fingerprint="")
        table = BlockTable(self._pool, self._runner, block_size=BLOCK_SIZE, root_hash=root)
        try:
            rows = []
            first = prompt_ids[:-1]
            for start in range(0, len(first), PREFILL_CHUNK):
                self._extend(table, first[start : start + PREFILL_CHUNK], num_rows=0)
            pending = [prompt_ids[-1], *answer_ids]
            for start in range(0, len(pending), group):
                chunk = pending[start : start + group]
                rows += self._extend(table, chunk, num_rows=len(chunk))
            return np.stack(rows)
        finally:
            table.free()

    def time_steps(
        self, prompt_ids: Sequence[int], groups: Sequence[int], *, num_passes: int
    ) -> tuple[float, dict[int, float]]:
        """Return the seconds of the prefill and of one pass over each number of new tokens."""
        root = compute_root_hash(cache_scope=b"", model_fingerprint="")
        table = BlockTable(self._pool, self._runner, block_size=BLOCK_SIZE, root_hash=root)
        try:
            began = time.perf_counter()
            for start in range(0, len(prompt_ids), PREFILL_CHUNK):
                self._extend(table, prompt_ids[start : start + PREFILL_CHUNK], num_rows=0)
            prefill_s = time.perf_counter() - began
            steps = {}
            for group in groups:
                began = time.perf_counter()
                for _ in range(num_passes):
                    self._extend(table, prompt_ids[:group], num_rows=group)
                steps[group] = (time.perf_counter() - began) / num_passes
                table.trim(len(prompt_ids))
            return prefill_s, steps
        finally:
            table.free()

    def run_together(
        self, prompt_ids: Sequence[int], *, num_sequences: int, num_steps: int
    ) -> float:
        """Return the seconds of one pass that computes one token of every sequence."""
        root = compute_root_hash(cache_scope=b"", model_fingerprint="")
        tables = [
            BlockTable(self._pool, self._runner, block_size=BLOCK_SIZE, root_hash=root)
            for _ in range(num_sequences)
        ]
        try:
            for table in tables:
                for start in range(0, len(prompt_ids), PREFILL_CHUNK):
                    self._extend(table, prompt_ids[start : start + PREFILL_CHUNK], num_rows=0)
            began = time.perf_counter()
            for token_id in prompt_ids[:num_steps]:
                self._step_all(tables, token_id)
            return (time.perf_counter() - began) / num_steps
        finally:
            for table in tables:
                table.free()

    def _step_all(self, tables: Sequence[BlockTable], token_id: int) -> None:
        for table in tables:
            table.reserve(table.num_tokens + 1)
        lengths = [table.num_tokens for table in tables]
        segments = [
            Segment(num_cached=length, num_chain=1, tree=None, slot_runs=tuple(runs))
            for length, runs in (
                (length, table.slot_runs(length + 1))
                for length, table in zip(lengths, tables, strict=True)
            )
        ]
        logits = self._runner.execute(
            StepInputs(
                token_ids=np.full(len(tables), token_id, dtype=np.int64),
                position_ids=np.asarray(lengths, dtype=np.int64),
                slot_ids=np.concatenate(
                    [
                        table.slots(length, length + 1)
                        for table, length in zip(tables, lengths, strict=True)
                    ]
                ),
                logit_rows=np.arange(len(tables), dtype=np.int64),
                segments=tuple(segments),
            )
        )
        for index, table in enumerate(tables):
            table.extend(1)
            logits.row(index)

    def _extend(
        self, table: BlockTable, token_ids: Sequence[int], *, num_rows: int
    ) -> list[NDArray[np.float32]]:
        start, num_new = table.num_tokens, len(token_ids)
        table.reserve(start + num_new)
        segment = Segment(
            num_cached=start,
            num_chain=num_new,
            tree=None,
            slot_runs=tuple(table.slot_runs(start + num_new)),
        )
        step = StepInputs(
            token_ids=np.asarray(token_ids, dtype=np.int64),
            position_ids=segment.compute_query_positions().astype(np.int64),
            slot_ids=table.slots(start, start + num_new),
            logit_rows=np.arange(num_new - max(1, num_rows), num_new, dtype=np.int64),
            segments=(segment,),
        )
        logits = self._runner.execute(step)
        table.extend(num_new)
        return [logits.row(i) for i in range(num_rows)]
