"""Reads a prompt once, then continues it by several answers, giving the logits at every token."""

from __future__ import annotations

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

BLOCK_SIZE = 16
CHUNK_TOKENS = 512


class PromptReader:
    """One model with room for one sequence."""

    def __init__(
        self, model: LoadedModel, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int
    ) -> None:
        """Make room for prompts and answers of ``max_tokens`` together."""
        num_blocks = -(-max_tokens // BLOCK_SIZE) + 1
        vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), model.vocab_size)
        self._pool = BlockPool(num_blocks)
        self._runner = ModelRunner(
            model, vocabulary, num_blocks=num_blocks, block_size=BLOCK_SIZE, backend="sdpa"
        )
        root = compute_root_hash(cache_scope=b"", model_fingerprint="")
        self._table = BlockTable(self._pool, self._runner, block_size=BLOCK_SIZE, root_hash=root)
        self._num_prompt_tokens = 0
        self._last_id = 0

    def read_prompt(self, token_ids: Sequence[int]) -> None:
        """Forget everything, then read all of a prompt but its last token."""
        self._table.free()
        for start in range(0, len(token_ids) - 1, CHUNK_TOKENS):
            stop = min(start + CHUNK_TOKENS, len(token_ids) - 1)
            self._extend(token_ids[start:stop], num_rows=0)
        self._num_prompt_tokens = len(token_ids) - 1
        self._last_id = token_ids[-1]

    def begin_answer(self) -> NDArray[np.float32]:
        """Forget the answer so far; return [vocab_size] logits of the first answer token."""
        self._table.trim(self._num_prompt_tokens)
        return self._extend([self._last_id], num_rows=1)[0]

    def append(self, token_id: int) -> NDArray[np.float32]:
        """Append an answer token; return [vocab_size] logits of the next."""
        return self._extend([token_id], num_rows=1)[0]

    def read_answer(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return [num_tokens, vocab_size]; row t is what answer token t is chosen from."""
        self._table.trim(self._num_prompt_tokens)
        return np.stack(self._extend([self._last_id, *token_ids[:-1]], num_rows=len(token_ids)))

    def _extend(self, token_ids: Sequence[int], *, num_rows: int) -> list[NDArray[np.float32]]:
        start, num_new = self._table.num_tokens, len(token_ids)
        self._table.reserve(start + num_new)
        segment = Segment(
            num_cached=start,
            num_chain=num_new,
            tree=None,
            slot_runs=tuple(self._table.slot_runs(start + num_new)),
        )
        step = StepInputs(
            token_ids=np.asarray(token_ids, dtype=np.int64),
            position_ids=segment.compute_query_positions().astype(np.int64),
            slot_ids=self._table.slots(start, start + num_new),
            logit_rows=np.arange(num_new - max(1, num_rows), num_new, dtype=np.int64),
            segments=(segment,),
        )
        logits = self._runner.execute(step)
        self._table.extend(num_new)
        return [logits.row(row) for row in range(num_rows)]
