"""An engine in a process of its own, spoken to over a multiprocessing connection.

The parent sends :data:`~specrag_inference.messages.EngineMessage` and receives
:data:`~specrag_inference.messages.EngineReply`; the first reply is ``EngineReady`` or
``EngineCrashed``. Signals meant for the service reach this process too when a whole process group
is signalled; they are ignored here, because the parent drains first. The process ends on ``None``,
when the connection closes, or when the parent is gone.
"""

from __future__ import annotations

import logging
import signal
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING

from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import EngineCrashed, EngineReady, StatsRequest
from specrag_inference.models.loading import DtypeName, load_model, load_tokenizer
from specrag_inference.models.reference import ModelReferenceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from specrag_inference.messages import EngineCommand, EngineMessage

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcessSettings:
    """What an engine process is started with; plain values that travel to another process.

    Attributes:
        model: model reference.
        cache_dir: where converted models are kept.
        dtype: ``auto``, ``bf16`` or ``fp32``.
        num_threads: torch threads; ``None`` leaves torch's own choice.
        engine: sizes.
    """

    model: str
    cache_dir: Path
    dtype: DtypeName = "auto"
    num_threads: int | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)


def run_engine(connection: Connection, settings: EngineProcessSettings) -> None:
    """Load the model, then serve until told to end; the target of a child process.

    Raises:
        SystemExit: with code 1 after an error, once ``EngineCrashed`` has been sent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        engine = _load_engine(settings)
        connection.send(_describe(engine))
        _serve(engine, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except (ModelReferenceError, OSError) as error:
        _crash(connection, str(error))
    except Exception as error:
        _LOGGER.exception("the engine process failed")
        _crash(connection, f"{type(error).__name__}: {error}")


def _load_engine(settings: EngineProcessSettings) -> Engine:
    tokenizer = load_tokenizer(settings.model, settings.cache_dir)
    model = load_model(
        settings.model,
        dtype=settings.dtype,
        cache_dir=settings.cache_dir,
        num_threads=settings.num_threads,
    )
    return Engine(model, tokenizer, settings.engine)


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


def _serve(engine: Engine, connection: Connection) -> None:
    """Alternate between taking messages and running steps; sleep when there is nothing to do."""
    parent = parent_process()
    sentinels = [] if parent is None else [parent.sentinel]
    while True:
        ready = wait([connection, *sentinels], timeout=0 if engine.has_work else None)
        if any(sentinel in ready for sentinel in sentinels):
            return
        for message in _receive_all(connection):
            if message is None:
                return
            if isinstance(message, StatsRequest):
                connection.send(engine.stats())
            else:
                engine.submit(message)
        if engine.has_work and (events := engine.step()):
            connection.send(tuple(events))


def _receive_all(connection: Connection) -> Iterator[EngineCommand | StatsRequest | None]:
    """Yield everything that has arrived, batches taken apart."""
    while connection.poll():
        message: EngineMessage = connection.recv()
        if isinstance(message, tuple):
            yield from message
        else:
            yield message


def _crash(connection: Connection, message: str) -> None:
    try:
        connection.send(EngineCrashed(message=message))
    except OSError:
        _LOGGER.warning("the engine's parent is gone; its last message was: %s", message)
    raise SystemExit(1)
