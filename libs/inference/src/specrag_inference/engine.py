"""The engine: commands in, events out, one forward pass a step.

Single-threaded and synchronous; owned by one thread or process. :meth:`Engine.submit` only notes
what is to be done, :meth:`Engine.step` runs at most one forward pass over everything that is due.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specrag_inference.admission import Admission, SequenceRefusedError
from specrag_inference.batching import Part, build_step
from specrag_inference.cache.block_pool import BlockPool
from specrag_inference.engine_config import EngineConfig
from specrag_inference.jobs.job import Extension, ExtensionLogits, JobLimits
from specrag_inference.jobs.propose import ProposeJob
from specrag_inference.jobs.verify import VerifyJob
from specrag_inference.messages import (
    EngineStats,
    FreeSequence,
    OpenSequence,
    ProposeTokens,
    SequenceFailed,
    VerifyTree,
)
from specrag_inference.runner import ModelRunner, TokenVocabulary
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.scheduler import Candidate, SchedulerLimits, plan_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

    from specrag_inference.jobs.job import Job
    from specrag_inference.live import LiveSequence
    from specrag_inference.messages import EngineCommand, EngineEvent
    from specrag_inference.models.loading import LoadedModel
    from specrag_inference.runner import LogitRows
    from specrag_inference.scheduler import Grant
    from specrag_inference.step_runner import StepRunner

__all__ = ["Engine", "EngineConfig"]

CAPACITY = "CAPACITY"
INVALID = "INVALID"
NUMERICS = "NUMERICS"


class Engine:
    """Serves many sequences of one model with one block cache.

    Attributes:
        model: the model served.
        tokenizer: its tokenizer.
        config: the sizes it was built with.
        vocabulary: which output rows are tokens.
        pool: the block pool; read it for checks, mutate it never.
    """

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig | None = None,
        *,
        runner: StepRunner | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build an engine.

        Args:
            model: what is served; its module is not called when ``runner`` is given.
            tokenizer: its tokenizer.
            config: sizes.
            runner: executes the passes, with cache memory for ``config.num_blocks`` blocks of
                ``config.block_size`` tokens; ``None`` runs ``model`` in this process.
            clock: monotonic seconds.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.config = config or EngineConfig()
        self.vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), model.vocab_size)
        self.pool = BlockPool(self.config.num_blocks)
        self._clock = clock
        self._runner: StepRunner = runner or ModelRunner(
            model,
            self.vocabulary,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            backend=self.config.backend,
        )
        self._limits = SchedulerLimits(
            max_step_tokens=self.config.max_step_tokens,
            max_shared_prefill_tokens=self.config.max_shared_prefill_tokens,
            block_size=self.config.block_size,
        )
        self._job_limits = JobLimits(
            vocab_size=self.vocabulary.size,
            max_model_len=model.max_model_len,
            max_nodes=self.config.max_step_tokens - 1,
        )
        self._admission = Admission(
            model,
            tokenizer,
            vocab_size=self.vocabulary.size,
            pool=self.pool,
            copier=self._runner,
            block_size=self.config.block_size,
            max_sequences=self.config.max_sequences,
            clock=clock,
        )
        self._live: dict[str, LiveSequence] = {}
        self._events: list[EngineEvent] = []
        self._num_steps = 0
        self._num_preemptions = 0
        self._may_admit = False
        self._is_starved = False

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        return bool(
            self._events
            or self._may_admit
            or any(live.extension is not None for live in self._live.values())
        )

    def submit(self, command: EngineCommand) -> None:
        """Note a command; what comes of it is reported by later steps."""
        self._may_admit = True
        match command:
            case OpenSequence():
                self._open(command)
            case VerifyTree() | ProposeTokens():
                self._enqueue(command)
            case FreeSequence():
                self._free(command.sequence_id)
            case _:
                raise TypeError(f"{command!r} is no engine command")

    def step(self) -> list[EngineEvent]:
        """Run at most one forward pass and return what has happened since the last call."""
        self._admit()
        candidates = [
            self._describe(live) for live in self._live.values() if live.extension is not None
        ]
        grants = plan_step(candidates, num_free_blocks=self.pool.num_free, limits=self._limits)
        self._is_starved = bool(candidates) and not grants
        if grants:
            self._run(grants)
        elif candidates:
            self._relieve(candidates)
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        return EngineStats(
            num_running=len(self._live),
            num_waiting=self._admission.num_waiting,
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_preemptions=self._num_preemptions,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when block tables and pool disagree."""
        self.pool.check_integrity([live.sequence.table.block_ids for live in self._live.values()])

    def close(self) -> None:
        """Free all sequences; nothing is reported any more."""
        for sequence_id in list(self._live):
            self._free(sequence_id)
        self._admission.clear()
        self._events.clear()

    def _admit(self) -> None:
        """Let waiting sequences in, unless running ones lack blocks already."""
        if not self._is_starved:
            for live in self._admission.admit(self._live):
                self._live[live.sequence.sequence_id] = live
                self._advance(live)
        # Whoever still waits can only be let in after something has changed.
        self._may_admit = False

    def _open(self, command: OpenSequence) -> None:
        sequence_id = command.sequence_id
        if sequence_id in self._live or self._admission.is_waiting(sequence_id):
            self._fail(sequence_id, INVALID, f"sequence_id='{sequence_id}' is open already")
            return
        try:
            self._admission.enqueue(command)
        except SequenceRefusedError as refusal:
            self._fail(sequence_id, refusal.code, str(refusal))

    def _enqueue(self, command: VerifyTree | ProposeTokens) -> None:
        sequence_id = command.sequence_id
        live = self._live.get(sequence_id)
        if live is None:
            reason = (
                "has not been opened yet"
                if self._admission.is_waiting(sequence_id)
                else "is not open"
            )
            self._fail(sequence_id, INVALID, f"sequence_id='{sequence_id}' {reason}")
            return
        live.enqueue(self._build_job(live, command), submitted_at=self._clock())
        if live.extension is None:
            self._advance(live)

    def _build_job(self, live: LiveSequence, command: VerifyTree | ProposeTokens) -> Job:
        build = VerifyJob if isinstance(command, VerifyTree) else ProposeJob
        return build(
            live.sequence,
            command,  # type: ignore[arg-type]  # each class takes its own command
            self._job_limits,
        )

    def _free(self, sequence_id: str) -> None:
        self._admission.withdraw(sequence_id)
        live = self._live.pop(sequence_id, None)
        if live is not None:
            live.sequence.table.free()

    def _fail(self, sequence_id: str, code: str, message: str) -> None:
        self._free(sequence_id)
        self._events.append(SequenceFailed(sequence_id=sequence_id, code=code, message=message))

    def _advance(self, live: LiveSequence) -> None:
        self._guard(live, live.advance())

    def _guard(self, live: LiveSequence, events: Iterable[EngineEvent]) -> bool:
        """Collect events; when the sequence cannot go on, fail it alone and return false."""
        sequence_id = live.sequence.sequence_id
        try:
            self._events.extend(events)
        except NumericsError as error:
            live.sequence.table.discard()
            self._fail(sequence_id, NUMERICS, str(error))
            return False
        except ValueError as error:
            self._fail(sequence_id, INVALID, str(error))
            return False
        return True

    def _describe(self, live: LiveSequence) -> Candidate:
        """Return what the scheduler needs to know of a sequence that wants a pass."""
        extension, table = live.extension, live.sequence.table
        assert extension is not None
        num_nodes = len(extension.node_token_ids)
        num_resident = 0 if extension.tree is None else len(extension.tree.depths) - num_nodes
        return Candidate(
            sequence_id=live.sequence.sequence_id,
            order=live.order,
            last_step=live.last_step,
            num_chain=extension.num_chain,
            num_nodes=num_nodes,
            num_positions=table.num_tokens,
            num_resident=num_resident,
            num_held_blocks=len(table.block_ids),
            num_shared_blocks=table.count_shared_blocks(),
        )

    def _run(self, grants: Sequence[Grant]) -> None:
        self._num_steps += 1
        self._may_admit = self._admission.num_waiting > 0
        shares = [(self._live[grant.sequence_id], grant) for grant in grants]
        parts = [_cut_part(live, grant) for live, grant in shares]
        step = build_step(parts)
        started = self._clock()
        rows = self._runner.execute(step)
        forward_s = self._clock() - started
        first_row = 0
        for (live, grant), part in zip(shares, parts, strict=True):
            live.last_step = self._num_steps
            self._settle(live, grant, rows, first_row=first_row, forward_s=forward_s)
            first_row += part.num_logit_rows

    def _settle(
        self,
        live: LiveSequence,
        grant: Grant,
        rows: LogitRows,
        *,
        first_row: int,
        forward_s: float,
    ) -> None:
        """Count a sequence's share as cached and let its job go on."""
        table = live.sequence.table
        table.extend(grant.num_chain)
        table.publish(live.sequence.token_ids)
        if grant.is_whole:
            logits = ExtensionLogits(rows, first_row=first_row, num_chain=grant.num_chain)
            if not self._guard(live, live.complete(logits, forward_s=forward_s)):
                return
        self._advance(live)

    def _relieve(self, candidates: Sequence[Candidate]) -> None:
        """Nobody fits: take the blocks of the youngest other sequence, or give up the oldest."""
        oldest = min(candidates, key=lambda candidate: candidate.order)
        victims = [
            live
            for live in self._live.values()
            if live.sequence.table.block_ids and live.sequence.sequence_id != oldest.sequence_id
        ]
        if victims:
            victim = max(victims, key=lambda live: live.order)
            victim.preempt()
            self._num_preemptions += 1
            self._advance(victim)
            return
        length = oldest.num_positions + oldest.num_resident + oldest.num_tokens
        self._fail(
            oldest.sequence_id,
            CAPACITY,
            f"num_tokens={length} exceeds the cache of {self.config.num_blocks} blocks of "
            f"{self.config.block_size} tokens",
        )


def _cut_part(live: LiveSequence, grant: Grant) -> Part:
    """Return the granted share: the whole extension, or a chunk of its chain."""
    extension = live.extension
    assert extension is not None
    if not grant.is_whole:
        extension = Extension(num_chain=grant.num_chain, wants_logits=False)
    return Part(sequence=live.sequence, extension=extension)
