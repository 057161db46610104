"""One key's view of a worker process."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, Self

from specrag_common.runtime.errors import Capacity

if TYPE_CHECKING:
    from collections.abc import Hashable

    from specrag_common.runtime.errors import SpecragError


class ChannelOwner(Protocol):
    """What a channel asks of its worker."""

    def send(self, message: Any) -> None:
        """Queue a message for the child without waiting."""
        ...

    def close_channel(self, channel: WorkerChannel, farewell: Any) -> None:
        """Forget ``channel`` and send ``farewell`` unless it is ``None``."""
        ...


class WorkerChannel:
    """Sends to the child and receives the events of one key; one task reads at a time."""

    def __init__(self, owner: ChannelOwner, key: Hashable, max_pending: int) -> None:
        """Belongs to ``owner``; holds at most ``max_pending`` unread events."""
        self.key = key
        self._owner = owner
        self._max_pending = max_pending
        self._events: deque[Any] = deque()
        self._failure: SpecragError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def send(self, message: Any) -> None:
        """Queue a message for the child without waiting.

        Raises:
            Capacity: the child lags behind by more messages than the worker holds.
            ModelFailure: the child is gone.
        """
        self._owner.send(message)

    async def receive(self) -> Any:
        """Return this key's next event, in the order the child sent them. Safe to cancel.

        Raises:
            ModelFailure: the child is gone; events that came before are delivered first.
            Capacity: this channel was not read for too long and lost events.
        """
        while not self._events:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            assert self._waiter is None, "one task reads a channel at a time"
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def close(self, farewell: Any = None) -> None:
        """Give the key back; ``farewell`` is still sent, however full the way is.

        Never raises and never waits, so it belongs in ``finally``; closing twice is harmless.
        """
        self._owner.close_channel(self, farewell)

    def deliver(self, event: Any) -> None:
        """Take an event from the worker; a full channel fails and disturbs no other."""
        if self._failure is not None:
            return
        if len(self._events) >= self._max_pending:
            self.fail(
                Capacity(f"key {self.key!r} holds {self._max_pending} unread events, the limit")
            )
            return
        self._events.append(event)
        self._wake()

    def fail(self, failure: SpecragError) -> None:
        """Make ``receive`` raise ``failure`` once the events that came before are read."""
        if self._failure is None:
            self._failure = failure
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
