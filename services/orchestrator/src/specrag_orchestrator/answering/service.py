"""All answers of this process: admission, the time they may take, cancellation."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Final

from specrag_common.runtime import call_context, deadlines
from specrag_common.runtime.errors import (
    Cancelled,
    Capacity,
    DeadlineExceeded,
    InternalError,
    SpecragError,
)
from specrag_common.runtime.logs import get_logger

from specrag_orchestrator.answering.answer import Answer
from specrag_orchestrator.answering.events import EventStream

if TYPE_CHECKING:
    from specrag_orchestrator.answering.resources import Resources
    from specrag_orchestrator.question import Question

RETRY_HINT_S: Final = 1.0
CANCEL_WAIT_S: Final = 3.0
"""Longest time a cancel waits for the partial turn to be saved."""

_log = get_logger(__name__)


class RunningAnswer:
    """An answer under way; its events are read once, from :attr:`events`."""

    def __init__(self, question: Question, answer_id: str) -> None:
        """Not started yet; :class:`AnswerService` does."""
        self.answer_id = answer_id
        self.tenant = question.tenant
        self.events = EventStream()
        self.task: asyncio.Task[None] | None = None

    def leave(self) -> None:
        """The caller reads no further: stop everything, unless the answer is over."""
        self.events.abandon()
        if self.task is not None:
            self.task.cancel()

    def on_rpc_done(self, _context: object) -> None:
        """See :meth:`leave`; called by grpc when the rpc is over, in whatever way."""
        self.leave()

    async def cancel(self) -> None:
        """Stop the answer and return once its partial turn is saved and its session free."""
        assert self.task is not None, "the answer was started"
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=CANCEL_WAIT_S)


class AnswerService:
    """Starts answers, each in a task of its own that outlives its rpc only to clean up."""

    def __init__(
        self, resources: Resources, *, max_concurrent_answers: int, answer_timeout_s: float
    ) -> None:
        """Serve with ``resources``.

        Args:
            resources: what every answer uses.
            max_concurrent_answers: more are refused at admission.
            answer_timeout_s: time an answer may take when its caller set no deadline.
        """
        self._resources = resources
        self._max_concurrent_answers = max_concurrent_answers
        self._answer_timeout_s = answer_timeout_s
        self._running: dict[tuple[str, str], RunningAnswer] = {}

    @property
    def num_running(self) -> int:
        """Answers under way."""
        return len(self._running)

    def start(self, question: Question) -> RunningAnswer:
        """Start to answer.

        Raises:
            Capacity: too many answers are under way; nothing was started.
        """
        if len(self._running) >= self._max_concurrent_answers:
            raise Capacity(
                f"{len(self._running)} answers are running, the limit is "
                f"{self._max_concurrent_answers}; try again shortly",
                retry_delay_s=RETRY_HINT_S,
            )
        running = RunningAnswer(question, uuid.uuid4().hex)
        self._running[running.tenant, running.answer_id] = running
        running.task = asyncio.create_task(self._run(question, running))
        running.task.add_done_callback(lambda _: self._settle(running))
        return running

    async def cancel(self, tenant: str, answer_id: str) -> bool:
        """Stop an answer of a tenant; returns whether it was running here."""
        running = self._running.get((tenant, answer_id))
        if running is None:
            return False
        await running.cancel()
        return True

    async def close(self) -> None:
        """Stop what is still running and wait for its clean-up."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, question: Question, running: RunningAnswer) -> None:
        call_context.bind_session_id(question.session_id or None)
        timeout_s = self._bind_deadline()
        answer = Answer(question, self._resources, running.events, answer_id=running.answer_id)
        try:
            async with asyncio.timeout(timeout_s):
                finished = await answer.run()
                # Before the caller sees the end: its next question must find the place free.
                self._forget(running)
                await running.events.put(finished)
        except asyncio.CancelledError:
            running.events.end(Cancelled(f"answer {running.answer_id} was stopped"))
            raise
        except Exception as exc:  # noqa: BLE001 - every fault is told to the caller
            running.events.end(_to_error(exc))
        else:
            running.events.end()

    def _bind_deadline(self) -> float:
        """Give outgoing calls the answer's deadline; returns the seconds left."""
        left = deadlines.remaining_s()
        timeout_s = self._answer_timeout_s if left is None else left
        deadlines.set_remaining(timeout_s)
        return timeout_s

    def _forget(self, running: RunningAnswer) -> None:
        self._running.pop((running.tenant, running.answer_id), None)

    def _settle(self, running: RunningAnswer) -> None:
        """Clean up behind a task, also one that was cancelled before its first step."""
        self._forget(running)
        running.events.end_if_open(Cancelled(f"answer {running.answer_id} was stopped"))


def _to_error(exc: Exception) -> SpecragError:
    if isinstance(exc, SpecragError):
        return exc
    if isinstance(exc, TimeoutError):
        return DeadlineExceeded("the time for this answer is used up; raise the deadline")
    error_id = uuid.uuid4().hex[:8]
    _log.error("answer crashed", error_id=error_id, exc_info=exc)
    return InternalError(f"internal error, id {error_id}", metadata={"error_id": error_id})
