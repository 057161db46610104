"""The engine: commands in, events out, one forward pass a step.

Single-threaded and synchronous; owned by one thread or process. :meth:`Engine.submit` only notes
what is to be done, :meth:`Engine.step` runs at most one forward pass over everything that is due.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from specrag_inference.admission import Admission
from specrag_inference.batching import build_step, cut_part
from specrag_inference.cache.block_pool import BlockPool
from specrag_inference.deadlines import Deadlines
from specrag_inference.engine_config import EngineConfig
from specrag_inference.engine_stats import EngineStats, PassTally
from specrag_inference.jobs.job import ExtensionLogits, JobLimits
from specrag_inference.jobs.registry import build_job
from specrag_inference.messages import (
    FreeSequence,
    JobCommand,
    OpenSequence,
    PassLoad,
    SequenceFailed,
)
from specrag_inference.opening import SequenceBuilder, SequenceRefusedError
from specrag_inference.roster import Roster
from specrag_inference.runner import ModelRunner, TokenVocabulary
from specrag_inference.sampling.numerics import NumericsError
from specrag_inference.scheduler import SchedulerLimits, plan_step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from transformers import PreTrainedTokenizerBase

    from specrag_inference.live import LiveSequence
    from specrag_inference.messages import EngineCommand, EngineEvent
    from specrag_inference.models.loading import LoadedModel
    from specrag_inference.scheduler import Grant
    from specrag_inference.step_runner import StepRunner

__all__ = ["Engine", "EngineConfig"]

CAPACITY = "CAPACITY"
DEADLINE = "DEADLINE"
INVALID = "INVALID"
NUMERICS = "NUMERICS"
OVERLOADED = "OVERLOADED"

MAX_JOBS = 64
"""Commands of one sequence that may be pending at a time."""


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
            cuda_graphs=self.config.cuda_graphs,
            kv_cache_dtype=self.config.kv_cache_dtype,
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
        builder = SequenceBuilder(
            model,
            tokenizer,
            vocab_size=self.vocabulary.size,
            pool=self.pool,
            copier=self._runner,
            block_size=self.config.block_size,
            kv_cache_dtype=self.config.kv_cache_dtype,
        )
        self._admission = Admission(
            builder,
            self.pool,
            max_sequences=self.config.max_sequences,
            max_waiting=self.config.max_waiting,
            clock=clock,
        )
        self._roster = Roster()
        self._deadlines = Deadlines()
        self._events: list[EngineEvent] = []
        self._tally = PassTally()
        self._turns = itertools.count(1)
        self._num_preemptions = 0
        self._may_admit = False
        self._is_starved = False

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do anything."""
        return bool(
            self._events
            or self._may_admit
            or self._roster.list_asking()
            or self.seconds_to_deadline() == 0
        )

    def seconds_to_deadline(self) -> float | None:
        """Return in how many seconds :meth:`step` must be called even if nothing is submitted."""
        due_at = self._deadlines.get_next()
        return None if due_at is None else max(0.0, due_at - self._clock())

    def submit(self, command: EngineCommand) -> None:
        """Note a command; what comes of it is reported by later steps.

        Raises:
            TypeError: it is no command; nothing has happened.
        """
        if isinstance(command, OpenSequence):
            self._open(command)
        elif isinstance(command, JobCommand):
            self._enqueue(command)
        elif isinstance(command, FreeSequence):
            self._free(command.sequence_id)
        else:
            raise TypeError(f"{command!r} is no engine command")

    def step(self) -> list[EngineEvent]:
        """Run at most one forward pass and return what has happened since the last call."""
        self._expire()
        self._admit()
        asking = self._roster.list_asking()
        candidates = [live.describe() for live in asking if not live.is_parked]
        grants = plan_step(candidates, num_free_blocks=self.pool.num_free, limits=self._limits)
        self._is_starved = bool(candidates) and not grants
        if grants:
            self._run(grants, asking)
        elif asking:
            self._relieve(asking)
        events, self._events = self._events, []
        return events

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        return EngineStats(
            num_running=len(self._roster),
            num_waiting=self._admission.num_waiting,
            num_pending_jobs=sum(live.num_jobs for live in self._roster),
            num_blocks=self.pool.num_blocks,
            num_free_blocks=self.pool.num_free,
            num_cached_blocks=self.pool.num_cached,
            num_preemptions=self._num_preemptions,
            num_prefix_tokens=self._admission.num_prefix_tokens,
            num_prefix_hit_tokens=self._admission.num_prefix_hit_tokens,
            oldest_wait_s=self._compute_oldest_wait(),
            batches=self._tally.snapshot(),
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when block tables and pool disagree."""
        self.pool.check_integrity([live.sequence.table.block_ids for live in self._roster])

    def close(self) -> None:
        """Free all sequences; nothing is reported any more."""
        for live in list(self._roster):
            self._free(live.sequence.sequence_id)
        self._admission.clear()
        self._events.clear()

    def _compute_oldest_wait(self) -> float:
        now = self._clock()
        since = [live.asking_since for live in self._roster.list_asking()]
        if self._admission.waiting_since is not None:
            since.append(self._admission.waiting_since)
        return now - min(since, default=now)

    def _open(self, command: OpenSequence) -> None:
        sequence_id = command.sequence_id
        if sequence_id in self._roster or self._admission.is_waiting(sequence_id):
            message = f"sequence_id='{sequence_id}' is open already; both are given up"
            self._fail(sequence_id, INVALID, message)
            return
        try:
            self._admission.enqueue(command)
        except SequenceRefusedError as refusal:
            self._fail(sequence_id, refusal.code, str(refusal))
            return
        self._may_admit = True
        if command.deadline_s is not None:
            self._deadlines.set(sequence_id, self._clock() + command.deadline_s)

    def _enqueue(self, command: JobCommand) -> None:
        sequence_id = command.sequence_id
        live = self._roster.get(sequence_id)
        if live is None:
            is_waiting = self._admission.is_waiting(sequence_id)
            reason = "has not been opened yet" if is_waiting else "is not open"
            self._fail(sequence_id, INVALID, f"sequence_id='{sequence_id}' {reason}")
            return
        if live.num_jobs >= MAX_JOBS:
            message = f"num_jobs={live.num_jobs} of '{sequence_id}' has reached max_jobs={MAX_JOBS}"
            self._fail(sequence_id, OVERLOADED, message)
            return
        job = build_job(live.sequence, command, self._job_limits)
        live.enqueue(job, submitted_at=self._clock())
        if live.extension is None:
            self._advance(live)

    def _free(self, sequence_id: str) -> None:
        self._deadlines.discard(sequence_id)
        self._admission.withdraw(sequence_id)
        live = self._roster.remove(sequence_id)
        if live is not None:
            live.sequence.table.free()
        self._may_admit = self._admission.num_waiting > 0

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

    def _expire(self) -> None:
        """Fail the sequences that have run out of time, wherever they are."""
        for sequence_id in self._deadlines.pop_due(self._clock()):
            live = self._roster.get(sequence_id)
            where = "before it was admitted" if live is None else live.tell_progress()
            self._fail(sequence_id, DEADLINE, f"the sequence ran out of time {where}")

    def _admit(self) -> None:
        """Let preempted sequences go on, then waiting ones in, unless running ones lack blocks."""
        # Whoever still waits afterwards can only be let in when something has changed.
        self._may_admit = False
        if self._is_starved:
            return
        for live in self._roster.list_parked():
            if not live.resume(num_spare_blocks=self._roster.count_holders()):
                return
            self._advance(live)
        for live in self._admission.admit(self._roster):
            self._roster.add(live)
            self._advance(live)

    def _run(self, grants: Sequence[Grant], asking: Iterable[LiveSequence]) -> None:
        self._may_admit = self._admission.num_waiting > 0
        for live in asking:
            live.num_passed_over += 1
        shares = [(self._roster[grant.sequence_id], grant) for grant in grants]
        parts = [cut_part(live.sequence, live.extension, grant) for live, grant in shares]
        step = build_step(parts)
        started = self._clock()
        rows = self._runner.execute(step)
        forward_s = self._clock() - started
        self._tally.begin_pass()
        load = PassLoad(len(step.token_ids), len(parts))
        first_row = 0
        for (live, grant), part in zip(shares, parts, strict=True):
            live.last_turn = next(self._turns)
            self._tally.add_share(part.extension.kind, grant.num_tokens)
            logits = ExtensionLogits(
                rows,
                first_row=first_row,
                num_chain=grant.num_chain,
                num_nodes=grant.num_nodes,
                load=load,
            )
            first_row += part.num_logit_rows
            self._settle(live, grant, logits, forward_s=forward_s)

    def _settle(
        self, live: LiveSequence, grant: Grant, logits: ExtensionLogits, *, forward_s: float
    ) -> None:
        """Count a sequence's share as cached and let its job go on."""
        table = live.sequence.table
        table.extend(grant.num_chain)
        table.publish(live.sequence.token_ids)
        if grant.ends_chain and not self._guard(live, live.complete(logits, forward_s=forward_s)):
            return
        self._advance(live)

    def _relieve(self, asking: Sequence[LiveSequence]) -> None:
        """Nobody fits: take the blocks of the youngest other sequence, or give up the oldest."""
        oldest = min(asking, key=lambda live: live.order)
        victim = self._roster.choose_victim(spared=oldest)
        if victim is not None:
            victim.preempt()
            self._num_preemptions += 1
            self._advance(victim)
            return
        needed = oldest.describe()
        length = needed.num_positions + needed.num_resident + needed.num_tokens
        self._fail(
            oldest.sequence.sequence_id,
            CAPACITY,
            f"num_tokens={length} exceeds the cache of {self.config.num_blocks} blocks of "
            f"{self.config.block_size} tokens",
        )
