"""What the ranks of a replica tell each other, besides the collectives of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a process stands in its replica, and how the ranks find each other.

    Attributes:
        rank: 0 leads.
        size: ranks of the replica.
        init_method: torch's address of the meeting point: ``file://…`` for ranks of one machine,
            ``tcp://HOST:PORT`` across machines.
        local_rank: index of the device on this machine.
    """

    rank: int
    size: int
    init_method: str
    local_rank: int

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """First message to a follower.

    Attributes:
        place: where it stands.
        plan: what to load; ``engine.num_blocks`` is final.
    """

    place: RankPlace
    plan: EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One pass for a follower to repeat: first the copies, in their order, then the step.

    Attributes:
        copies: (source, destination) slots of every copy since the last step.
        step: the pass.
    """

    copies: tuple[tuple[SlotIds, SlotIds], ...]
    step: StepInputs


@dataclass(frozen=True, slots=True)
class RankReady:
    """A follower has loaded its share."""


@dataclass(frozen=True, slots=True)
class RankAlive:
    """A follower's process runs; sent every second whatever its passes do."""


@dataclass(frozen=True, slots=True)
class RankFailed:
    """A follower's last words.

    Attributes:
        message: the error in one line.
        details: where it was raised.
    """

    message: str
    details: str


RankReport = RankReady | RankAlive | RankFailed
"""What a follower sends."""
