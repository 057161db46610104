"""A live sequence and the queue of its jobs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from specrag_inference.jobs.prefill import PrefillJob
from specrag_inference.jobs.propose import ProposeJob
from specrag_inference.scheduler import Candidate

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
        last_turn: when it was served last, in increasing numbers.
        num_passed_over: passes since it asked for one in which it had no share.
        extension: what it needs from the next pass; ``None`` when it has nothing to do.
        asking_since: when it asked for that.
        is_parked: it lost its blocks to another and waits until there is room for all of them.
    """

    def __init__(self, sequence: SequenceState, *, order: int, clock: Callable[[], float]) -> None:
        self.sequence = sequence
        self.order = order
        self.last_turn = 0
        self.num_passed_over = 0
        self.extension: Extension | None = None
        self.asking_since = 0.0
        self.is_parked = False
        self._clock = clock
        self._jobs: deque[tuple[Job, float]] = deque()
        self._is_started = False

    @property
    def num_jobs(self) -> int:
        """Jobs that are not done."""
        return len(self._jobs)

    @property
    def is_opening(self) -> bool:
        """Whether the prompt is still on its way into the cache."""
        return bool(self._jobs) and isinstance(self._jobs[0][0], PrefillJob)

    def will_publish(self, block_hash: bytes, block_idx: int) -> bool:
        """Return whether computing the prompt will make this block of it findable."""
        hashes = self.sequence.prefix_hashes
        return (
            self.is_opening
            and not self.is_parked
            and block_idx < len(hashes)
            and hashes[block_idx] == block_hash
        )

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
        self.num_passed_over = 0
        self.asking_since = self._clock()
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
        """Hand the logits of the extension to the job at work.

        Raises:
            NumericsError: a needed row has a NaN or an infinity.
        """
        job, _ = self._jobs[0]
        yield from job.complete(logits, forward_s=forward_s)

    def describe(self) -> Candidate:
        """Return what the scheduler needs to know; only while there is an extension."""
        extension, table = self.extension, self.sequence.table
        assert extension is not None
        num_nodes = len(extension.node_token_ids)
        num_resident = 0 if extension.tree is None else len(extension.tree.depths) - num_nodes
        return Candidate(
            sequence_id=self.sequence.sequence_id,
            order=self.order,
            last_turn=self.last_turn,
            num_passed_over=self.num_passed_over,
            num_chain=extension.num_chain,
            num_nodes=num_nodes,
            num_positions=table.num_tokens,
            num_resident=num_resident,
            num_held_blocks=len(table.block_ids),
            num_shared_blocks=table.count_shared_blocks(),
            is_opening=self.is_opening,
            nodes_can_wait=extension.nodes_can_wait,
        )

    def tell_progress(self) -> str:
        """Return how far it has come, as part of a message."""
        sequence = self.sequence
        return (
            f"with {sequence.table.num_tokens} of {len(sequence.token_ids)} tokens cached and "
            f"{sequence.num_answer_tokens} answer tokens"
        )

    def preempt(self) -> None:
        """Give the cache back; what was in it is computed again when it is needed."""
        self.sequence.forget_cache()
        self.is_parked = True
        if not self._jobs:
            self.sequence.draft_tree = None

    def resume(self, *, num_spare_blocks: int) -> bool:
        """Take the blocks for all that was lost and is asked for; false when there is no room.

        Leaves ``num_spare_blocks`` to the others. Call :meth:`advance` afterwards: what is still
        cached need not be computed.
        """
        num_nodes = 0 if self.extension is None else len(self.extension.node_token_ids)
        found = self.sequence.table.claim(
            self.sequence.prefix_hashes,
            len(self.sequence.token_ids) + num_nodes,
            num_spare_blocks=num_spare_blocks,
        )
        self.is_parked = found is None
        return not self.is_parked
