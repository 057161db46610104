"""A child process behind an asyncio surface, for work that must not run on the event loop.

The child is a fresh interpreter (never a fork: live gRPC does not survive one). Two threads of the
parent send and receive, so a slow or stuck child never blocks the loop. What the child sends is
routed by key to one bounded channel a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import socket
import sys
import threading
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection
from typing import Any, Final

from specrag_common.runtime.errors import Capacity, ModelFailure
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.worker_channel import WorkerChannel
from specrag_common.runtime.worker_messages import ChildFailed, ChildStart

KeyOf = Callable[[Any], Hashable | None]
"""Returns the key of an object the child sent; ``None`` sends it to ``on_unkeyed``."""

_STOP_SENDING: Final = object()

_log = get_logger(__name__)


class WorkerProcess:
    """Owns one child process. ``await start()`` first, ``await stop()`` last; not used twice."""

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
                It sends one first message when ready, then events, or tuples of events that are
                routed one by one; it serves until ``connection.recv()`` raises
                ``EOFError``, then returns (the error may also just leave it).
            args: picklable arguments.
            key_of: finds the key of an event.
            on_death: called once, on the loop, with a reason, when the child ends unasked.
            on_unkeyed: called on the loop with events whose key is ``None``.
            max_outgoing: messages held for a child that lags behind.
            max_pending: unread events held for one channel.
        """
        self._target = target
        self._args = args
        self._key_of = key_of
        self._on_death = on_death
        self._on_unkeyed = on_unkeyed
        self._max_outgoing = max_outgoing
        self._max_pending = max_pending
        self._channels: dict[Hashable, WorkerChannel] = {}
        self._outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._pipes: _Pipes | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._death: ModelFailure | None = None
        self._is_stopping = False
        self.num_dropped = 0

    @property
    def num_open(self) -> int:
        """How many channels are open."""
        return len(self._channels)

    @property
    def is_alive(self) -> bool:
        """Whether the child is ready and not known to be gone."""
        return self._process is not None and self._death is None

    @property
    def pid(self) -> int | None:
        """Process id of the child, once started."""
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float = 600.0) -> Any:
        """Start the child and return its first message.

        Raises:
            ModelFailure: the child failed, ended, or said nothing for ``timeout_s``.
        """
        assert self._pipes is None, "a worker is started once"
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[Any] = self._loop.create_future()
        self._put(ChildStart(tuple(sys.path), self._target, pickle.dumps(self._args)))
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn()
                return await self._ready
        except TimeoutError as exc:
            await self.stop(grace_s=0.0)
            message = f"the worker {self._target} was not ready after {timeout_s:g} s"
            raise ModelFailure(message) from exc
        except BaseException:
            await self.stop(grace_s=0.0)
            raise

    def open(self, key: Hashable) -> WorkerChannel:
        """Return the channel of a key that is not open yet.

        Raises:
            ModelFailure: the child is gone.
        """
        if self._death is not None:
            raise self._death.with_traceback(None)
        assert key not in self._channels, f"key {key!r} is open already"
        channel = WorkerChannel(self, key, self._max_pending)
        self._channels[key] = channel
        return channel

    def send(self, message: Any) -> None:
        """Queue a message that belongs to no channel; see :meth:`WorkerChannel.send`."""
        if self._death is not None:
            raise self._death.with_traceback(None)
        if self._outgoing.qsize() >= self._max_outgoing:
            raise Capacity(
                f"the worker lags {self._max_outgoing} messages behind, the limit",
                retry_delay_s=1.0,
            )
        self._put(message)

    def close_channel(self, channel: WorkerChannel, farewell: Any = None) -> None:
        """Forget a channel; called by :meth:`WorkerChannel.close`."""
        if self._channels.get(channel.key) is not channel:
            return
        del self._channels[channel.key]
        if farewell is not None and self._death is None:
            self._put(farewell)

    async def stop(self, grace_s: float = 10.0) -> int | None:
        """End the child: close its input, then SIGTERM, then SIGKILL; returns its exit code.

        Open channels fail. Calling it again, or on a worker that never started, is harmless.
        """
        self._is_stopping = True
        self._outgoing.put(_STOP_SENDING)
        process = self._process
        if process is not None:
            for escalate in (None, process.terminate, process.kill):
                if escalate is not None and process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        escalate()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if escalate == process.kill else grace_s):
                        await process.wait()
                    break
        if self._pipes is not None:
            pipes, self._pipes = self._pipes, None
            await asyncio.to_thread(pipes.close)
        self._die("it was stopped")
        return None if process is None else process.returncode

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline = os.pipe()
        self._pipes = _Pipes(ours, lifeline)
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
        self._pipes.run(self._send_all, self._receive_all)

    def _put(self, message: Any) -> None:
        """Queue the pickled message: one that cannot be pickled hurts its sender alone."""
        self._outgoing.put(pickle.dumps(message))

    def _send_all(self, pipes: _Pipes) -> None:
        """Body of the sending thread."""
        while (message := self._outgoing.get()) is not _STOP_SENDING:
            try:
                pipes.connection.send_bytes(message)
            except OSError:
                return  # the receiving thread sees the end too and reports it
        with contextlib.suppress(OSError):
            pipes.socket.shutdown(socket.SHUT_WR)

    def _receive_all(self, pipes: _Pipes) -> None:
        """Body of the receiving thread."""
        reason = "it closed its connection"
        try:
            while True:
                event = pipes.connection.recv()
                if isinstance(event, ChildFailed):
                    reason = event.message
                else:
                    self._call_in_loop(self._route, event)
        except (EOFError, OSError):
            pass
        except Exception as exc:  # noqa: BLE001 - an event that cannot be read ends the child
            self._call_in_loop(self._die, f"an event cannot be read: {exc}")
            return
        self._call_in_loop(self._start_death_report, reason)

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

    def _start_death_report(self, reason: str) -> None:
        self._death_report = asyncio.ensure_future(self._report_death(reason))

    async def _report_death(self, reason: str) -> None:
        """Wait a moment for the exit code, which often is the whole story."""
        assert self._process is not None, "only a started child can die"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                reason = f"{reason} (exit code {await self._process.wait()})"
        self._die(reason)

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = ModelFailure(f"the worker {self._target} is gone: {reason}")
        if self._process is not None and not self._ready.done():
            self._ready.set_exception(self._death)
            self._ready.exception()  # retrieved here: nobody may be waiting any more
        for channel in self._channels.values():
            channel.fail(self._death)
        if not self._is_stopping:
            _log.error("worker died", target=self._target, pid=self.pid, reason=reason)
            if self._on_death is not None:
                self._on_death(self._death.message)


class _Pipes:
    """The parent's ends of a worker's pipes and the threads that serve them."""

    def __init__(self, ours: socket.socket, lifeline: int) -> None:
        self.socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self._lifeline = lifeline
        self._threads: list[threading.Thread] = []

    def run(self, *bodies: Callable[[_Pipes], None]) -> None:
        """Start one thread for each body."""
        for body in bodies:
            thread = threading.Thread(target=body, args=(self,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self) -> None:
        """Wake the threads, wait for them and close everything. Blocks for a moment."""
        os.close(self._lifeline)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        self.connection.close()
        self.socket.close()
