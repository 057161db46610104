"""An engine in a process of its own, spoken to over a multiprocessing connection.

The parent sends :data:`~specrag_inference.messages.EngineMessage` and receives
:data:`~specrag_inference.messages.EngineReply`; the first reply is ``EngineReady`` or
``EngineCrashed``. Signals meant for the service reach this process too when a whole process group
is signalled; they are ignored here, because the parent drains first. The process ends on ``None``,
when the connection closes, or when the parent is gone; further ranks end with it, and it ends with
them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Final

from specrag_inference.messages import EngineCrashed, EngineReady, StatsRequest
from specrag_inference.models.quantization import QuantizationError
from specrag_inference.models.reference import ModelReferenceError
from specrag_inference.parallel.degree import TensorParallelError
from specrag_inference.parallel.watch import RankLostError
from specrag_inference.planned import opened_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_inference.engine import Engine
    from specrag_inference.messages import EngineCommand, EngineMessage, EngineReply
    from specrag_inference.plan import EnginePlan

_LAST_WORDS_WAIT_S: Final = 1.0

_LOGGER = logging.getLogger(__name__)


def run_engine(connection: Connection, plan: EnginePlan) -> None:
    """Load the model, then serve until told to end; the target of a child process.

    Raises:
        SystemExit: with code 1 after an error, once ``EngineCrashed`` has been sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    replies = _Replies(connection)
    try:
        with opened_engine(plan, on_loss=replies.crash_now) as engine:
            replies.send(_describe(engine))
            _serve(engine, connection, replies)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (
        ModelReferenceError,
        OSError,
        QuantizationError,
        RankLostError,
        TensorParallelError,
    ) as error:
        replies.crash(str(error))
    except Exception as error:
        _LOGGER.exception("the engine process failed")
        replies.crash(f"{type(error).__name__}: {error}")


def _describe(engine: Engine) -> EngineReady:
    model = engine.model
    return EngineReady(
        model_id=model.model_id,
        revision=model.revision,
        max_model_len=model.max_model_len,
        vocab_size=engine.vocabulary.size,
        eos_token_ids=model.eos_token_ids,
        num_blocks=engine.config.num_blocks,
        block_size=engine.config.block_size,
        dtype=str(model.dtype).removeprefix("torch."),
    )


def _serve(engine: Engine, connection: Connection, replies: _Replies) -> None:
    """Alternate between taking messages and running steps; sleep when there is nothing to do."""
    parent = parent_process()
    sentinels = [] if parent is None else [parent.sentinel]
    while True:
        timeout = 0 if engine.has_work else engine.seconds_to_deadline()
        ready = wait([connection, *sentinels], timeout)
        if any(sentinel in ready for sentinel in sentinels):
            return
        for message in _receive_all(connection):
            if message is None:
                return
            if isinstance(message, StatsRequest):
                replies.send(engine.stats())
            else:
                engine.submit(message)
        if engine.has_work and (events := engine.step()):
            replies.send(tuple(events))


def _receive_all(connection: Connection) -> Iterator[EngineCommand | StatsRequest | None]:
    """Yield everything that has arrived, batches taken apart."""
    while connection.poll():
        message: EngineMessage = connection.recv()
        if isinstance(message, tuple):
            yield from message
        else:
            yield message


class _Replies:
    """Sends to the parent, from the engine's thread and from the one that watches ranks."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, reply: EngineReply) -> None:
        """Send one reply whole."""
        with self._lock:
            self._connection.send(reply)

    def crash(self, message: str) -> None:
        """Say why this process ends, and end it in order."""
        self._send_last(message)
        raise SystemExit(1)

    def crash_now(self, message: str) -> None:
        """Say why this process ends, and end it though its main thread may wait for ever."""
        self._send_last(message)
        os._exit(1)

    def _send_last(self, message: str) -> None:
        if not self._lock.acquire(timeout=_LAST_WORDS_WAIT_S):
            _LOGGER.warning("the engine's parent does not listen; its last message: %s", message)
            return
        try:
            self._connection.send(EngineCrashed(message=message))
        except OSError:
            _LOGGER.warning("the engine's parent is gone; its last message was: %s", message)
        finally:
            self._lock.release()
