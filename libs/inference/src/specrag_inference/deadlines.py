"""Which sequence runs out of time next."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Deadlines:
    """Deadlines by sequence, on the engine's clock."""

    def __init__(self) -> None:
        self._due_at: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, sequence_id: str, due_at: float) -> None:
        """Give a sequence a deadline."""
        self._due_at[sequence_id] = due_at
        heapq.heappush(self._heap, (due_at, sequence_id))

    def discard(self, sequence_id: str) -> None:
        """Forget a sequence's deadline, if it has one."""
        self._due_at.pop(sequence_id, None)

    def get_next(self) -> float | None:
        """Return when the next deadline is due; ``None`` without one."""
        while self._heap and self._due_at.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> Iterator[str]:
        """Yield the sequences whose deadline has come, and forget it."""
        while (due_at := self.get_next()) is not None and due_at <= now:
            sequence_id = heapq.heappop(self._heap)[1]
            self.discard(sequence_id)
            yield sequence_id
