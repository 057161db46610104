"""Lets sequences in when there is room for their prompt, in the order they came."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specrag_common.speculation.randomness import RandomStream

from specrag_inference.cache.block_pool import compute_root_hash
from specrag_inference.cache.block_table import BlockTable
from specrag_inference.ends import AnswerEnds
from specrag_inference.jobs.prefill import PrefillJob
from specrag_inference.live import LiveSequence
from specrag_inference.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sized

    from transformers import PreTrainedTokenizerBase

    from specrag_inference.cache.block_pool import BlockPool
    from specrag_inference.cache.block_table import SlotCopier
    from specrag_inference.messages import OpenSequence
    from specrag_inference.models.loading import LoadedModel

_MAX_HEADROOM_TOKENS = 256
_TREE_TOKENS = 64
"""Scratch behind the answer that a token tree takes, for the headroom only."""


class SequenceRefusedError(Exception):
    """A sequence that can never be opened; ``code`` says whose fault it is."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Admission:
    """The queue of sequences to be opened."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocab_size: int,
        pool: BlockPool,
        copier: SlotCopier,
        block_size: int,
        max_sequences: int,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._pool = pool
        self._copier = copier
        self._block_size = block_size
        self._max_sequences = max_sequences
        self._clock = clock
        self._waiting: dict[str, tuple[SequenceState, float]] = {}
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    def is_waiting(self, sequence_id: str) -> bool:
        """Return whether the sequence is in the queue."""
        return sequence_id in self._waiting

    def enqueue(self, command: OpenSequence) -> None:
        """Check a sequence and put it at the end of the queue.

        Raises:
            SequenceRefusedError: it can never be opened.
        """
        self._check(command)
        try:
            sequence = self._build_sequence(command)
        except ValueError as error:
            raise SequenceRefusedError("INVALID", str(error)) from error
        self._waiting[command.sequence_id] = (sequence, self._clock())

    def withdraw(self, sequence_id: str) -> None:
        """Take a sequence out of the queue, if it is there."""
        self._waiting.pop(sequence_id, None)

    def clear(self) -> None:
        """Empty the queue."""
        self._waiting.clear()

    def admit(self, live: Sized) -> Iterator[LiveSequence]:
        """Yield the sequences at the head of the queue that there is room for.

        Their prompts' blocks are reserved, cached prefixes taken up. ``live`` must grow by each
        sequence yielded: one block is left for each that runs.
        """
        while self._waiting and len(live) < self._max_sequences:
            sequence_id, (sequence, submitted_at) = next(iter(self._waiting.items()))
            num_cached = sequence.table.adopt_prefix(sequence.token_ids[:-1])
            missing = sequence.table.count_missing_blocks(len(sequence.token_ids))
            if missing + len(live) > self._pool.num_free:
                sequence.table.free()
                return
            sequence.table.reserve(len(sequence.token_ids))
            del self._waiting[sequence_id]
            job = PrefillJob(sequence, num_cached_tokens=num_cached)
            self._num_admitted += 1
            admitted = LiveSequence(sequence, order=self._num_admitted, clock=self._clock)
            admitted.enqueue(job, submitted_at=submitted_at)
            yield admitted

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
        num_blocks = -(-(num_tokens + 1) // self._block_size)
        if num_blocks > self._pool.num_blocks:
            raise SequenceRefusedError(
                "CAPACITY",
                f"num_tokens={num_tokens} needs {num_blocks} cache blocks, there are "
                f"{self._pool.num_blocks}",
            )

    def _build_sequence(self, command: OpenSequence) -> SequenceState:
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
        return SequenceState(
            sequence_id=command.sequence_id,
            token_ids=[*command.prompt_token_ids, *command.answer_token_ids],
            num_prompt_tokens=num_prompt_tokens,
            table=self._build_table(command),
            sampling=sampling,
            mode=command.mode,
            random=RandomStream(command.random_key),
            drafter_index=command.drafter_index,
            ends=ends,
            finished=decision.finish_reason is not None,
        )

    def _build_table(self, command: OpenSequence) -> BlockTable:
        growth = min(command.sampling.max_tokens, _MAX_HEADROOM_TOKENS) + _TREE_TOKENS
        return BlockTable(
            self._pool,
            self._copier,
            block_size=self._block_size,
            root_hash=compute_root_hash(
                cache_scope=command.cache_scope, model_fingerprint=self._model.revision
            ),
            headroom_blocks=min(-(-growth // self._block_size), self._pool.num_blocks // 8),
        )
