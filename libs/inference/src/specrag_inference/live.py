"""A live sequence and the queue of its jobs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from specrag_inference.jobs.propose import ProposeJob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specrag_inference.jobs.job import Extension, ExtensionLogits, Job
    from specrag_inference.messages import EngineEvent
    from specrag_inference.sequence import SequenceState


class LiveSequence:
    """Carries out one sequence's jobs in order.

    Attributes:
        sequence: the state the jobs work on.
        order: when it was opened, in increasing numbers.
        last_step: the pass that served it last.
        extension: what it needs from the next pass; ``None`` when it has nothing to do.
    """

    def __init__(self, sequence: SequenceState, *, order: int, clock: Callable[[], float]) -> None:
        self.sequence = sequence
        self.order = order
        self.last_step = 0
        self.extension: Extension | None = None
        self._clock = clock
        self._jobs: deque[tuple[Job, float]] = deque()
        self._is_started = False

    def enqueue(self, job: Job, *, submitted_at: float) -> None:
        """Add a job; drafting that a further drafting command overtakes is cut short."""
        if isinstance(job, ProposeJob):
            for earlier, _ in self._jobs:
                if isinstance(earlier, ProposeJob):
                    earlier.abandon()
        self._jobs.append((job, submitted_at))

    def advance(self) -> Iterator[EngineEvent]:
        """Find the next extension, finishing jobs that need none.

        Raises:
            ValueError: a command does not fit the sequence.
        """
        self.extension = None
        while self._jobs:
            job, submitted_at = self._jobs[0]
            if not self._is_started:
                job.start()
                self._is_started = True
            self.extension = job.next_extension()
            if self.extension is not None:
                return
            self._jobs.popleft()
            self._is_started = False
            yield from job.finish(elapsed_s=self._clock() - submitted_at)

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterator[EngineEvent]:
        """Hand the logits of the whole extension to the job at work.

        Raises:
            NumericsError: a needed row has a NaN or an infinity.
        """
        job, _ = self._jobs[0]
        yield from job.complete(logits, forward_s=forward_s)

    def preempt(self) -> None:
        """Give the cache back; what was in it is computed again when it is needed."""
        self.sequence.forget_cache()
        if not self._jobs:
            self.sequence.draft_tree = None
