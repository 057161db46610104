"""What reaches the driver of a joint answer, from all its streams, in one queue."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specrag_common.wire.proposals import KeyedProposal

    from specrag_orchestrator.target import TargetMessage

MAX_QUEUED_MESSAGES = 64
"""Messages that may wait for the driver before the streams are read no further."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSaid:
    """The target's next message."""

    message: TargetMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFailed:
    """The target's stream broke; the answer cannot go on."""

    error: Exception


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterProposed:
    """A drafter answered a round."""

    keyed: KeyedProposal


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterLost:
    """A drafter's stream broke; the others go on.

    Attributes:
        drafter_index: the drafter.
        reason: UPPER_SNAKE.
        detail: in words.
    """

    drafter_index: int
    reason: str
    detail: str


InboxMessage = TargetSaid | TargetFailed | DrafterProposed | DrafterLost
Inbox = asyncio.Queue[InboxMessage]


def new_inbox() -> Inbox:
    """Return an empty inbox."""
    return asyncio.Queue(MAX_QUEUED_MESSAGES)
