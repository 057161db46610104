"""An engine in a process of its own, with one handle a sequence."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

from specrag_common.runtime import deadlines
from specrag_common.runtime.errors import (
    Capacity,
    DeadlineExceeded,
    InvalidRequest,
    ModelFailure,
    SpecragError,
    UpstreamUnavailable,
)
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.worker import WorkerProcess
from specrag_inference.messages import (
    EngineCrashed,
    EngineReady,
    FreeSequence,
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    ScoreTree,
    SequenceFailed,
    SequenceOpened,
    StatsRequest,
    TokensProposed,
    TreeScored,
    VerifyTree,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    import numpy as np
    from numpy.typing import NDArray
    from specrag_common.runtime.worker_channel import WorkerChannel
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_inference.engine_stats import EngineStats
    from specrag_inference.plan import EnginePlan

_ENGINE_TARGET: Final = "specrag_inference.serve:run_engine"

_MAX_PENDING_EVENTS: Final = 8192
"""Unread events of one sequence; more than the longest free run sends."""

_START_TIMEOUT_S: Final = 1800.0
"""Loading a large model takes minutes."""

_log = get_logger(__name__)


class EngineSequence:
    """One live sequence of the engine. Close it in ``finally``: that frees its blocks."""

    def __init__(self, channel: WorkerChannel, sequence_id: str) -> None:
        """Made by :meth:`EngineHost.open`."""
        self._channel = channel
        self._sequence_id = sequence_id

    async def wait_opened(self) -> SequenceOpened:
        """Return once the prompt is in the cache."""
        event = await self._receive()
        assert isinstance(event, SequenceOpened), f"expected SequenceOpened, got {event!r}"
        return event

    async def verify(
        self, round_number: int, tree: TokenTree, *, free_run_tokens: int = 0
    ) -> AsyncGenerator[RoundVerified]:
        """Verify a tree and yield what each target pass committed."""
        self._channel.send(
            VerifyTree(
                sequence_id=self._sequence_id,
                round=round_number,
                tree=tree,
                free_run_tokens=free_run_tokens,
            )
        )
        while True:
            event = await self._receive()
            assert isinstance(event, RoundVerified), f"expected RoundVerified, got {event!r}"
            yield event
            if event.last:
                return

    def ask_proposal(
        self,
        round_number: int,
        committed_token_ids: tuple[int, ...],
        *,
        gamma: int,
        num_branches: int,
    ) -> None:
        """Commit tokens and ask for branches, without waiting."""
        self._channel.send(
            ProposeTokens(
                sequence_id=self._sequence_id,
                round=round_number,
                committed_token_ids=committed_token_ids,
                gamma=gamma,
                num_branches=num_branches,
            )
        )

    async def receive_proposal(self) -> TokensProposed:
        """Return the branches of the oldest round asked for and not received."""
        event = await self._receive()
        assert isinstance(event, TokensProposed), f"expected TokensProposed, got {event!r}"
        return event

    async def score(
        self,
        token_ids: NDArray[np.int32],
        parent_idx: NDArray[np.int32],
        *,
        is_wanted: NDArray[np.bool_] | None = None,
    ) -> TreeScored:
        """Return the log-probs of a tree behind the sequence, which stays as it is."""
        self._channel.send(
            ScoreTree(
                sequence_id=self._sequence_id,
                score_id=0,
                token_ids=token_ids,
                parent_idx=parent_idx,
                is_wanted=is_wanted,
            )
        )
        event = await self._receive()
        assert isinstance(event, TreeScored), f"expected TreeScored, got {event!r}"
        return event

    def close(self) -> None:
        """Free the sequence, whatever it is doing. Never raises, never waits."""
        self._channel.close(FreeSequence(sequence_id=self._sequence_id))

    async def _receive(self) -> Any:
        try:
            event = await self._channel.receive()
        except ModelFailure as exc:
            raise _engine_gone(exc) from exc
        if isinstance(event, SequenceFailed):
            raise to_error(event)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class EngineHost:
    """Owns the engine process of one replica. ``await start()`` first, ``await stop()`` last."""

    def __init__(self, plan: EnginePlan, *, on_death: Callable[[str], None] | None = None) -> None:
        """Describe the engine; ``on_death`` gets a reason when the process ends unasked."""
        self._worker = WorkerProcess(
            _ENGINE_TARGET,
            (plan,),
            key_of=lambda event: getattr(event, "sequence_id", None),
            on_death=self._report_death,
            on_unkeyed=self._take_unkeyed,
            max_pending=_MAX_PENDING_EVENTS,
        )
        self.tp_size = plan.tp_size
        self._on_death = on_death
        self._crash_message = ""
        self._numbers = itertools.count()
        self._stats_wanted: deque[asyncio.Future[EngineStats]] = deque()

    @property
    def pid(self) -> int | None:
        """Process id of the engine."""
        return self._worker.pid

    async def start(self) -> EngineReady:
        """Start the process and return once the model is loaded.

        Raises:
            ModelFailure: the model cannot be loaded.
        """
        first: EngineReady | EngineCrashed = await self._worker.start(_START_TIMEOUT_S)
        if isinstance(first, EngineCrashed):
            await self._worker.stop()
            raise ModelFailure(first.message)
        return first

    async def stats(self) -> EngineStats:
        """Return a snapshot of the engine.

        Raises:
            ModelFailure: the engine is gone.
        """
        wanted: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._worker.send(StatsRequest())
        self._stats_wanted.append(wanted)
        return await wanted

    def _take_unkeyed(self, event: EngineStats | EngineCrashed) -> None:
        if isinstance(event, EngineCrashed):
            _log.error("engine crashed", error=event.message)
            self._crash_message = event.message
            return
        wanted = self._stats_wanted.popleft()
        if not wanted.done():
            wanted.set_result(event)

    def _report_death(self, reason: str) -> None:
        """Pass on why the process ended: in its own words, if it had time for any."""
        if self._on_death is not None:
            self._on_death(self._crash_message or reason)

    def open(self, command: OpenSequence) -> EngineSequence:
        """Admit a sequence; its id is made unique over the life of the process.

        A stream that ended may still have events on the way; they never reach a later one. Without
        a deadline of its own the sequence has that of the call being served.

        Raises:
            Capacity: the engine lags behind.
            UpstreamUnavailable: the engine is gone.
        """
        sequence_id = f"{command.sequence_id}#{next(self._numbers)}"
        try:
            channel = self._worker.open(sequence_id)
        except ModelFailure as exc:
            raise _engine_gone(exc) from exc
        sequence = EngineSequence(channel, sequence_id)
        try:
            deadline_s = command.deadline_s
            if deadline_s is None:
                deadline_s = deadlines.remaining_s()
            channel.send(replace(command, sequence_id=sequence_id, deadline_s=deadline_s))
        except BaseException:
            sequence.close()
            raise
        return sequence

    async def stop(self) -> int | None:
        """End the process; returns its exit code."""
        return await self._worker.stop()


def _engine_gone(exc: ModelFailure) -> UpstreamUnavailable:
    """Return what a caller sees: this replica is lost, another one can serve the request."""
    return UpstreamUnavailable(exc.message, reason="ENGINE_GONE", retry_delay_s=1.0)


def to_error(event: SequenceFailed) -> SpecragError:
    """Return the error a caller sees when its sequence failed."""
    if event.code in {"CAPACITY", "OVERLOADED"}:
        return Capacity(event.message, retry_delay_s=1.0)
    if event.code == "DEADLINE":
        return DeadlineExceeded(event.message)
    if event.code == "INVALID":
        return InvalidRequest("round", event.message)
    return ModelFailure(event.message, reason=event.code)
