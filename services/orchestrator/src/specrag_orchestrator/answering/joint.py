"""JOINT: drafters propose, the target verifies; this driver carries messages between them.

All decisions are the round machine's. Order within a step: first the messages that somebody waits
for (drafters, target), then the caller's events.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from opentelemetry import trace
from specrag_common.runtime.errors import ModelFailure, SpecragError, UpstreamUnavailable
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import TRACER_NAME

from specrag_orchestrator.answering.events import Degradation
from specrag_orchestrator.answering.inbox import (
    DrafterLost,
    DrafterProposed,
    TargetFailed,
    TargetSaid,
)
from specrag_orchestrator.answering.rounds import RoundMismatchError
from specrag_orchestrator.target import CLOSE_TIMEOUT_S, PromptAccepted, PromptPrefilled
from specrag_orchestrator.upstream import RETRY_HINT_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from typing import Any

    from specrag_orchestrator.answering.inbox import Inbox, InboxMessage
    from specrag_orchestrator.answering.progress import AnswerProgress
    from specrag_orchestrator.answering.round_messages import RoundStep
    from specrag_orchestrator.answering.rounds import RoundMachine
    from specrag_orchestrator.drafting import DraftStream
    from specrag_orchestrator.target import TargetMessage, VerificationStream


class JointAnswer:
    """Drives one answer's rounds from the open streams to its end."""

    def __init__(
        self,
        machine: RoundMachine,
        target: VerificationStream,
        draft_streams: Mapping[int, DraftStream],
        progress: AnswerProgress,
        inbox: Inbox,
        *,
        allow_fallback: bool,
        clock: Callable[[], float],
    ) -> None:
        """Take over the streams.

        Args:
            machine: decides; its drafters are those of ``draft_streams``.
            target: the opened verification stream.
            draft_streams: the drafters' streams by index, not yet running.
            progress: receives what the target says.
            inbox: where the streams put what the drafters say.
            allow_fallback: go on without drafters when all are lost.
            clock: monotonic seconds.
        """
        self._machine = machine
        self._target = target
        self._draft_streams = draft_streams
        self._progress = progress
        self._inbox = inbox
        self._allow_fallback = allow_fallback
        self._clock = clock
        self._round_span: trace.Span | None = None
        self._span_round = -1
        self.losses: list[Degradation] = []
        """Drafters that failed meanwhile."""

    async def run(self) -> None:
        """Answer; on the way out, whatever it is, every drafter's stream is cancelled.

        Raises:
            SpecragError: the target failed, or no drafter is left and none may be done without.
        """
        jobs = [self._read_target(), *(stream.run() for stream in self._draft_streams.values())]
        try:
            async with self._running(jobs):
                await self._carry_out(self._machine.begin(self._clock()))
                while not self._machine.is_done:
                    await self._handle(await self._next_message())
                for stream in self._draft_streams.values():
                    stream.finish()
        finally:
            self._end_round_span()

    async def _read_target(self) -> None:
        try:
            async with aclosing(self._target.messages()) as messages:
                async for message in messages:
                    await self._inbox.put(TargetSaid(message=message))
        except SpecragError as exc:
            await self._inbox.put(TargetFailed(error=exc))

    async def _next_message(self) -> InboxMessage | None:
        """Return what happens next, or ``None`` when the round's wait is over before."""
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        wait_until = self._machine.wait_until
        if wait_until is None:
            return await self._inbox.get()
        try:
            async with asyncio.timeout(max(0.0, wait_until - self._clock())):
                return await self._inbox.get()
        except TimeoutError:
            return None

    async def _handle(self, message: InboxMessage | None) -> None:
        match message:
            case None:
                await self._carry_out(self._machine.on_wait_over())
            case DrafterProposed(keyed=keyed):
                await self._carry_out(self._machine.on_proposal(keyed, self._clock()))
            case DrafterLost():
                await self._lose(message)
            case TargetFailed(error=error):
                raise error
            case TargetSaid(message=said):
                await self._handle_target(said)

    async def _handle_target(self, message: TargetMessage) -> None:
        if isinstance(message, PromptAccepted):
            await self._progress.on_accepted(message)
            return
        if isinstance(message, PromptPrefilled):
            self._progress.on_prefilled(message)
            self._machine.on_prefilled(self._clock())
            return
        try:
            step = self._machine.on_verified(message, self._clock())
        except RoundMismatchError as exc:
            raise ModelFailure(f"the verifier answered out of turn: {exc}") from exc
        if step.verified_tree is not None and self._round_span is not None:
            self._round_span.set_attribute(
                SpanKey.NUM_ACCEPTED_TOKENS, len(message.accepted_node_idx)
            )
        await self._send(step)
        await self._progress.on_verified(message, step.verified_tree)
        await self._show(step)

    async def _lose(self, lost: DrafterLost) -> None:
        self.losses.append(
            Degradation(
                component=f"drafter-{lost.drafter_index}", reason=lost.reason, detail=lost.detail
            )
        )
        step = self._machine.on_drafter_lost(lost.drafter_index)
        if not self._machine.live_drafters and not self._allow_fallback:
            raise UpstreamUnavailable(
                f"no drafter is left ({lost.detail}); allow_fallback lets the target go on alone",
                reason="NO_DRAFTERS",
                retry_delay_s=RETRY_HINT_S,
            )
        await self._carry_out(step)

    async def _carry_out(self, step: RoundStep) -> None:
        await self._send(step)
        await self._show(step)

    async def _send(self, step: RoundStep) -> None:
        if step.draft_calls:
            self._begin_round_span()
        for call in step.draft_calls:
            self._draft_streams[call.drafter_index].ask(call)
        if step.verify_call is not None:
            self._begin_round_span()
            if self._round_span is not None:
                num_draft_tokens = len(step.verify_call.tree.proposals)
                self._round_span.set_attribute(SpanKey.NUM_DRAFT_TOKENS, num_draft_tokens)
            await self._target.verify(step.verify_call)

    async def _show(self, step: RoundStep) -> None:
        if step.speculation is not None:
            await self._progress.on_speculation(step.speculation)

    def _begin_round_span(self) -> None:
        """Begin the span of the machine's round, unless it has begun."""
        if self._round_span is not None and self._span_round == self._machine.round:
            return
        self._end_round_span()
        self._span_round = self._machine.round
        self._round_span = trace.get_tracer(TRACER_NAME).start_span(
            SpanName.ROUND, attributes={SpanKey.ROUND.value: self._span_round}
        )

    def _end_round_span(self) -> None:
        if self._round_span is not None:
            self._round_span.end()
            self._round_span = None

    async def _guard(self, job: Coroutine[Any, Any, None]) -> None:
        """Run a stream's job; an unexpected fault ends the answer instead of hanging it."""
        try:
            await job
        except Exception as exc:  # noqa: BLE001 - raised again by the driver
            await self._inbox.put(TargetFailed(error=exc))

    @asynccontextmanager
    async def _running(self, jobs: Sequence[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
        """Run the streams' jobs beside the block; behind it they may end, or are cancelled."""
        tasks = [asyncio.create_task(self._guard(job)) for job in jobs]
        try:
            yield
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
