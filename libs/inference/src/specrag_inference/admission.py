"""Lets sequences in when there is room for their prompt.

First come, first served, with bounded overtaking: a prompt that does not fit yet lets later ones
pass, but only so often; then the queue stands until it fits. A prompt that continues a prefix which
is being computed at this moment waits for it instead of computing it a second time; whatever
becomes of the other sequence, the next attempt takes up what it has left.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from specrag_inference.jobs.prefill import PrefillJob
from specrag_inference.live import LiveSequence
from specrag_inference.opening import SequenceRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specrag_inference.cache.block_pool import BlockPool
    from specrag_inference.messages import OpenSequence
    from specrag_inference.opening import SequenceBuilder
    from specrag_inference.roster import Roster
    from specrag_inference.sequence import SequenceState

MAX_OVERTAKEN = 8
"""How many later sequences may be let in before one that does not fit."""

_MAX_LOOKAHEAD = 32
"""Sequences at the head of the queue that are considered at a time."""


@dataclass(slots=True)
class _Waiting:
    """A place in the queue."""

    sequence: SequenceState
    submitted_at: float
    num_overtaken: int = 0


class Admission:
    """The queue of sequences to be opened.

    Attributes:
        num_prefix_tokens: prompt tokens of the admitted that were looked up in the prefix cache.
        num_prefix_hit_tokens: those found.
    """

    def __init__(
        self,
        builder: SequenceBuilder,
        pool: BlockPool,
        *,
        max_sequences: int,
        max_waiting: int,
        clock: Callable[[], float],
    ) -> None:
        self.num_prefix_tokens = 0
        self.num_prefix_hit_tokens = 0
        self._builder = builder
        self._pool = pool
        self._max_sequences = max_sequences
        self._max_waiting = max_waiting
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    @property
    def waiting_since(self) -> float | None:
        """When the head of the queue came; ``None`` when nobody waits."""
        return next((entry.submitted_at for entry in self._waiting.values()), None)

    def is_waiting(self, sequence_id: str) -> bool:
        """Return whether the sequence is in the queue."""
        return sequence_id in self._waiting

    def enqueue(self, command: OpenSequence) -> None:
        """Check a sequence and put it at the end of the queue.

        Raises:
            SequenceRefusedError: it can never be opened, or the queue is full.
        """
        if len(self._waiting) >= self._max_waiting:
            raise SequenceRefusedError(
                "OVERLOADED",
                f"num_waiting={len(self._waiting)} has reached max_waiting={self._max_waiting}; "
                "try again later",
            )
        self._waiting[command.sequence_id] = _Waiting(self._builder.build(command), self._clock())

    def withdraw(self, sequence_id: str) -> None:
        """Take a sequence out of the queue, if it is there."""
        self._waiting.pop(sequence_id, None)

    def clear(self) -> None:
        """Empty the queue."""
        self._waiting.clear()

    def admit(self, live: Roster) -> Iterator[LiveSequence]:
        """Yield the sequences there is room for.

        Their prompts' blocks are reserved, cached prefixes taken up. ``live`` must grow by each
        sequence yielded: one block is left for each that runs.
        """
        passed: list[_Waiting] = []
        num_held_back = 0
        for entry in list(islice(self._waiting.values(), _MAX_LOOKAHEAD)):
            if len(live) + num_held_back >= self._max_sequences:
                return
            if self._is_on_its_way(entry.sequence, live):
                num_held_back += 1
                continue
            num_cached = entry.sequence.table.claim(
                entry.sequence.prefix_hashes,
                len(entry.sequence.token_ids),
                num_spare_blocks=len(live),
            )
            if num_cached is None:
                passed.append(entry)
            else:
                for earlier in passed:
                    earlier.num_overtaken += 1
                yield self._start(entry, num_cached)
            if any(earlier.num_overtaken >= MAX_OVERTAKEN for earlier in passed):
                return

    def _is_on_its_way(self, sequence: SequenceState, live: Roster) -> bool:
        """Return whether the first unknown block of the prompt is being computed for another."""
        hashes = sequence.prefix_hashes
        num_known = len(self._pool.lookup(hashes))
        if num_known == len(hashes):
            return False
        return any(other.will_publish(hashes[num_known], num_known) for other in live)

    def _start(self, entry: _Waiting, num_cached: int) -> LiveSequence:
        sequence = entry.sequence
        del self._waiting[sequence.sequence_id]
        self._num_admitted += 1
        self.num_prefix_tokens += len(sequence.token_ids) - 1
        self.num_prefix_hit_tokens += num_cached
        admitted = LiveSequence(sequence, order=self._num_admitted, clock=self._clock)
        admitted.enqueue(
            PrefillJob(sequence, num_cached_tokens=num_cached), submitted_at=entry.submitted_at
        )
        return admitted
