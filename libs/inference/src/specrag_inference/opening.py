"""From the command that opens a sequence to its state; what can never be served is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specrag_common.speculation.randomness import RandomStream

from specrag_inference.cache.block_pool import compute_root_hash
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.ends import AnswerEnds
from specrag_inference.sampling.processors import check_params
from specrag_inference.sequence import SequenceState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specrag_inference.cache.block_pool import BlockPool
    from specrag_inference.cache.block_table import SlotCopier
    from specrag_inference.engine_config import KvCacheDtype
    from specrag_inference.messages import OpenSequence
    from specrag_inference.models.loading import LoadedModel

_MAX_HEADROOM_TOKENS = 256
_TREE_TOKENS = 64
"""Scratch behind the answer that a token tree takes, for the headroom only."""


class SequenceRefusedError(Exception):
    """A sequence that is not opened; ``code`` is that of ``SequenceFailed``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class SequenceBuilder:
    """Makes the states of sequences that share one model and one pool."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        pool: BlockPool,
        copier: SlotCopier,
        block_size: int,
        kv_cache_dtype: KvCacheDtype,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pool = pool
        self._copier = copier
        self._block_size = block_size
        self._kv_fingerprint = f"{model.revision}:{kv_cache_dtype}"

    def build(self, command: OpenSequence) -> SequenceState:
        """Return the state, without any block.

        Raises:
            SequenceRefusedError: it can never be served.
        """
        self._check(command)
        try:
            return self._build(command)
        except ValueError as error:
            raise SequenceRefusedError("INVALID", str(error)) from error

    def _check(self, command: OpenSequence) -> None:
        prompt, answer = command.prompt_token_ids, command.answer_token_ids
        if not prompt:
            raise SequenceRefusedError("INVALID", "prompt_token_ids is empty")
        num_tokens = len(prompt) + len(answer)
        max_model_len = self._model.max_model_len
        if num_tokens >= max_model_len:
            raise SequenceRefusedError(
                "INVALID",
                f"num_prompt_tokens={len(prompt)} with num_answer_tokens={len(answer)} leaves no "
                f"room for an answer in max_model_len={max_model_len}",
            )
        tokens = (*prompt, *answer)
        if not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise SequenceRefusedError("INVALID", f"a token id is outside [0, {self._vocab_size})")
        for token_id, _ in command.sampling.logit_bias:
            if not 0 <= token_id < self._vocab_size:
                message = f"token id {token_id} of logit_bias is outside [0, {self._vocab_size})"
                raise SequenceRefusedError("INVALID", message)
        num_blocks = -(-(num_tokens + 1) // self._block_size)
        if num_blocks > self._pool.num_blocks:
            raise SequenceRefusedError(
                "CAPACITY",
                f"num_tokens={num_tokens} needs {num_blocks} cache blocks, there are "
                f"{self._pool.num_blocks}",
            )

    def _build(self, command: OpenSequence) -> SequenceState:
        check_params(command.sampling, self._vocab_size)
        sampling = replace(
            command.sampling,
            stop_token_ids=command.sampling.stop_token_ids | self._model.eos_token_ids,
        )
        num_prompt_tokens = len(command.prompt_token_ids)
        ends = AnswerEnds(
            sampling,
            tokenizer=self._tokenizer.backend_tokenizer if sampling.stop else None,
            max_context_tokens=self._model.max_model_len - num_prompt_tokens,
        )
        decision = ends.advance(command.answer_token_ids)
        token_ids = [*command.prompt_token_ids, *command.answer_token_ids]
        table = self._build_table(command)
        return SequenceState(
            sequence_id=command.sequence_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt_tokens,
            table=table,
            sampling=sampling,
            mode=command.mode,
            random=RandomStream(command.random_key),
            drafter_index=command.drafter_index,
            ends=ends,
            finished=decision.finish_reason is not None,
            prefix_hashes=table.compute_prefix_hashes(token_ids[:-1]),
        )

    def _build_table(self, command: OpenSequence) -> BlockTable:
        growth = min(command.sampling.max_tokens, _MAX_HEADROOM_TOKENS) + _TREE_TOKENS
        return BlockTable(
            self._pool,
            self._copier,
            block_size=self._block_size,
            root_hash=compute_root_hash(
                cache_scope=command.cache_scope, model_fingerprint=self._kv_fingerprint
            ),
            headroom_blocks=min(-(-growth // self._block_size), self._pool.num_blocks // 8),
        )
