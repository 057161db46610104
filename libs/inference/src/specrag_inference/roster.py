"""The open sequences of an engine, oldest first."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_inference.live import LiveSequence


class Roster:
    """Who is open, who asks for a pass, who holds blocks."""

    def __init__(self) -> None:
        self._live: dict[str, LiveSequence] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveSequence]:
        return iter(self._live.values())

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._live

    def __getitem__(self, sequence_id: str) -> LiveSequence:
        return self._live[sequence_id]

    def get(self, sequence_id: str) -> LiveSequence | None:
        """Return the open sequence of this name, if there is one."""
        return self._live.get(sequence_id)

    def add(self, live: LiveSequence) -> None:
        """Take in a sequence; it is younger than all others."""
        self._live[live.sequence.sequence_id] = live

    def remove(self, sequence_id: str) -> LiveSequence | None:
        """Give up a sequence and return it, if it was there."""
        return self._live.pop(sequence_id, None)

    def list_asking(self) -> list[LiveSequence]:
        """Return those that need a forward pass."""
        return [live for live in self if live.extension is not None]

    def list_parked(self) -> list[LiveSequence]:
        """Return those that need one and have lost their blocks."""
        return [live for live in self if live.extension is not None and live.is_parked]

    def count_holders(self) -> int:
        """Return how many hold blocks."""
        return sum(bool(live.sequence.table.block_ids) for live in self)

    def choose_victim(self, spared: LiveSequence) -> LiveSequence | None:
        """Return the youngest other sequence that holds blocks, if there is one."""
        holders = [live for live in self if live.sequence.table.block_ids and live is not spared]
        return max(holders, key=lambda live: live.order, default=None)
