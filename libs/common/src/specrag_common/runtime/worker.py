"""A child process behind an asyncio surface, for work that must not run on the event loop.

The child is a fresh interpreter (never a fork: live gRPC does not survive one). Objects are
pickled, sent and received by two threads of the parent, so a slow or stuck child never blocks the
loop. What the child sends is routed by key to one bounded queue a key; a tuple is a batch, whose
members are routed one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, Final, Self

from specrag_common.runtime.errors import Capacity, ModelFailure
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.worker_child import ChildFailed, ChildStart

KeyOf = Callable[[Any], Hashable | None]
"""Returns the key of an object the child sent; ``None`` sends it to ``on_unkeyed``."""

_STOP_SENDING: Final = object()

_log = get_logger(__name__)


class WorkerChannel:
    """One key's view of the worker. Made by :meth:`WorkerProcess.open`."""

    def __init__(self, worker: WorkerProcess, key: Hashable, max_pending: int) -> None:
        """Belongs to ``worker``; holds at most ``max_pending`` unread events."""
        self.key = key
        self._worker = worker
        self._events: asyncio.Queue[Any] = asyncio.Queue(max_pending)
        self._failure: Exception | None = None
        self._failed = asyncio.Event()

    def send(self, message: Any) -> None:
        """Queue a message for the child without waiting.

        Raises:
            Capacity: the child lags behind by more messages than the worker holds.
            ModelFailure: the child is gone.
        """
        self._worker.send(message)

    async def receive(self) -> Any:
        """Return this key's next event, in the order the child sent them.

        Raises:
            ModelFailure: the child is gone; events that came before are delivered first.
            Capacity: this channel was not read for too long and lost events.
        """
        if not self._events.empty():
            return self._events.get_nowait()
        if self._failure is not None:
            raise self._failure
        getter = asyncio.ensure_future(self._events.get())
        failed = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait({getter, failed}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
        finally:
            getter.cancel()
            failed.cancel()
        assert self._failure is not None, "woken without an event or a failure"
        raise self._failure

    def close(self, farewell: Any = None) -> None:
        """Give the key back; ``farewell`` is still sent, however full the way is.

        Never raises and never waits: it belongs in ``finally``.
        """
        self._worker.close_channel(self, farewell)

    def deliver(self, event: Any) -> None:
        """Take an event from the worker; a full queue fails this channel and no other."""
        try:
            self._events.put_nowait(event)
        except asyncio.QueueFull:
            limit = self._events.maxsize
            self.fail(Capacity(f"key {self.key!r} holds {limit} unread events, the limit"))

    def fail(self, failure: Exception) -> None:
        """Make ``receive`` raise ``failure`` once the queue is empty."""
        if self._failure is None:
            self._failure = failure
            self._failed.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class WorkerProcess:
    """Owns one child process. ``await start()`` first, ``await stop()`` last."""

    def __init__(
        self,
        target: str,
        args: tuple[Any, ...] = (),
        *,
        key_of: KeyOf,
        on_death: Callable[[str], None] | None = None,
        on_unkeyed: Callable[[Any], None] | None = None,
        max_outgoing: int = 4096,
        max_pending: int = 4096,
    ) -> None:
        """Describe the child.

        Args:
            target: ``module:function``; called in the child as ``function(connection, *args)``.
                It sends one first message when ready, serves until ``recv`` raises ``EOFError``,
                then returns.
            args: picklable arguments.
            key_of: finds the key of an event.
            on_death: called once, on the loop, with a reason, when the child ends unasked.
            on_unkeyed: called on the loop with events whose key is ``None``.
            max_outgoing: messages held for a child that lags behind.
            max_pending: unread events held for one channel.
        """
        self._start = ChildStart(target, args)
        self._key_of = key_of
        self._on_death = on_death
        self._on_unkeyed = on_unkeyed
        self._max_outgoing = max_outgoing
        self._max_pending = max_pending
        self._channels: dict[Hashable, WorkerChannel] = {}
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = False
        self._death: ModelFailure | None = None
        self.num_dropped = 0
        self.pid: int | None = None

    @property
    def num_open(self) -> int:
        """How many channels are open."""
        return len(self._channels)

    async def start(self, timeout_s: float = 600.0) -> Any:
        """Start the child and return its first message.

        Raises:
            ModelFailure: the child failed, ended, or said nothing for ``timeout_s``.
        """
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        ours, theirs = socket.socketpair()
        lifeline_read, self._lifeline = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "specrag_common.runtime.worker_child",
                str(theirs.fileno()),
                str(lifeline_read),
                pass_fds=(theirs.fileno(), lifeline_read),
            )
        finally:
            theirs.close()
            os.close(lifeline_read)
        self.pid = self._process.pid
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))
        self._outgoing.put(list(sys.path))
        self._outgoing.put(self._start)
        self._threads = [
            threading.Thread(target=body, name=f"worker-{name}-{self.pid}", daemon=True)
            for name, body in (("receive", self._receive_all), ("send", self._send_all))
        ]
        for thread in self._threads:
            thread.start()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._ready
        except TimeoutError as exc:
            await self.stop(grace_s=0.0)
            raise ModelFailure(
                f"the worker {self._start.target} was not ready after {timeout_s:g} s"
            ) from exc
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    def open(self, key: Hashable) -> WorkerChannel:
        """Return the channel of a key that is not open yet.

        Raises:
            ModelFailure: the child is gone.
        """
        if self._death is not None:
            raise self._death
        assert key not in self._channels, f"key {key!r} is open already"
        channel = WorkerChannel(self, key, self._max_pending)
        self._channels[key] = channel
        return channel

    def send(self, message: Any) -> None:
        """Queue a message that belongs to no channel; see :meth:`WorkerChannel.send`."""
        if self._death is not None:
            raise self._death
        if self._outgoing.qsize() >= self._max_outgoing:
            raise Capacity(
                f"the worker lags {self._max_outgoing} messages behind, the limit",
                retry_delay_s=1.0,
            )
        self._outgoing.put(message)

    def close_channel(self, channel: WorkerChannel, farewell: Any = None) -> None:
        """Forget a channel; called by :meth:`WorkerChannel.close`."""
        if self._channels.get(channel.key) is not channel:
            return
        del self._channels[channel.key]
        if farewell is not None and self._death is None:
            self._outgoing.put(farewell)

    async def stop(self, grace_s: float = 10.0) -> int | None:
        """End the child: close its input, then SIGTERM, then SIGKILL; returns its exit code.

        Open channels fail. Further calls return the same code.
        """
        self._stopping = True
        self._outgoing.put(_STOP_SENDING)
        for escalate in (None, self._process.terminate, self._process.kill):
            if escalate is not None and self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    escalate()
            try:
                async with asyncio.timeout(None if escalate == self._process.kill else grace_s):
                    await self._process.wait()
                break
            except TimeoutError:
                continue
        await self._close_pipes()
        return self._process.returncode

    async def _close_pipes(self) -> None:
        if self._lifeline < 0:
            return
        os.close(self._lifeline)
        self._lifeline = -1
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 5.0)
        self._socket.close()
        self._connection.close()

    def _send_all(self) -> None:
        """Body of the sending thread."""
        while (message := self._outgoing.get()) is not _STOP_SENDING:
            try:
                self._connection.send(message)
            except OSError:
                return  # the receiving thread sees the end too and reports it
            except Exception as exc:  # noqa: BLE001 - a message that cannot be pickled is ours
                self._call_in_loop(self._die, f"a message cannot be sent: {exc}")
                return
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _receive_all(self) -> None:
        """Body of the receiving thread."""
        reason = "it closed its connection"
        try:
            while True:
                event = self._connection.recv()
                if isinstance(event, ChildFailed):
                    reason = event.message
                else:
                    self._call_in_loop(self._route, event)
        except (EOFError, OSError):
            pass
        except Exception as exc:  # noqa: BLE001 - an event that cannot be read ends the child
            reason = f"an event cannot be read: {exc}"
        self._call_in_loop(self._die, reason)

    def _call_in_loop(self, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting
            self._loop.call_soon_threadsafe(callback, *args)

    def _route(self, event: Any) -> None:
        if not self._ready.done():
            self._ready.set_result(event)
            return
        for one in event if isinstance(event, tuple) else (event,):
            self._route_one(one)

    def _route_one(self, event: Any) -> None:
        key = self._key_of(event)
        if key is None and self._on_unkeyed is not None:
            self._on_unkeyed(event)
            return
        channel = self._channels.get(key)
        if channel is None:
            self.num_dropped += 1
        else:
            channel.deliver(event)

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = ModelFailure(f"the worker {self._start.target} is gone: {reason}")
        if not self._ready.done():
            self._ready.set_exception(self._death)
        for channel in self._channels.values():
            channel.fail(self._death)
        if not self._stopping:
            _log.error("worker died", target=self._start.target, pid=self.pid, reason=reason)
            if self._on_death is not None:
                self._on_death(self._death.message)
