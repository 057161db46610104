"""One answer's life: session, passages, decoding, turn saved, end told."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry import trace
from specrag_common.runtime.errors import FailedPrecondition, SpecragError
from specrag_common.runtime.logs import get_logger
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import current_trace_id, span
from specrag_common.sessions.model import SessionKey
from specrag_common.speculation.randomness import new_random_key, random_key_from_seed
from specrag_common.wire.sampling import check_biased_tokens

from specrag_orchestrator.answering.decoding import DecodingTask, decode_answer
from specrag_orchestrator.answering.draft_memory import DraftMemory, recall
from specrag_orchestrator.answering.events import Degradation, Finished
from specrag_orchestrator.answering.progress import AnswerProgress, ContextShrunkError
from specrag_orchestrator.answering.stats import AnswerTally
from specrag_orchestrator.answering.turns import (
    TurnFacts,
    build_turn,
    next_passage_number,
    replay_turn,
    require_repeat,
    restore_finished,
)
from specrag_orchestrator.conversation import build_query, compose_reading

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from specrag_common.sessions.lease import SessionLease
    from specrag_common.sessions.model import Session, Turn

    from specrag_orchestrator.answering.decoding import Decoded
    from specrag_orchestrator.answering.events import EventStream
    from specrag_orchestrator.answering.resources import Resources, SessionStore
    from specrag_orchestrator.answering.stats import AnswerStats
    from specrag_orchestrator.passages import SourcePassage
    from specrag_orchestrator.question import Question
    from specrag_orchestrator.target_model import TargetModel

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

CHARS_PER_TOKEN = 16
"""More code points than tokens have on average: bounds the history that is sent."""

MAX_HISTORY_CHARS = 600_000
"""Bounds it further: a prompt must fit one message."""

_log = get_logger(__name__)


class Answer:
    """Answers one question; :meth:`run` once."""

    def __init__(
        self, question: Question, resources: Resources, events: EventStream, *, answer_id: str
    ) -> None:
        """Take the question; its clock starts now."""
        self._question = question
        self._resources = resources
        self._events = events
        self._answer_id = answer_id
        self._trace_id = current_trace_id() or ""
        self._tally = AnswerTally(resources.clock)
        self._started_at = datetime.now(UTC)
        seed = question.seed
        self._random_key = new_random_key() if seed is None else random_key_from_seed(seed)
        self._progress: AnswerProgress | None = None
        self._fingerprint = ""
        trace.get_current_span().set_attributes(
            {
                SpanKey.ANSWER_ID.value: answer_id,
                SpanKey.SESSION_ID.value: question.session_id,
                SpanKey.VERIFICATION_MODE.value: question.mode,
            }
        )

    async def run(self) -> Finished:
        """Put every event but the last, which is returned.

        By then a session's turn is saved and its lease given back: whoever sees the end may ask
        the next question at once.

        Raises:
            SpecragError: why there is no answer, or no whole one.
        """
        if not self._question.session_id:
            return self._finish(await self._decode(None))
        store = self._get_store()
        key = SessionKey(tenant=self._question.tenant, session_id=self._question.session_id)
        async with await store.leases.acquire(key) as lease:
            session = await store.turn_log.open_session(key, collection=self._question.collection)
            request_id = self._question.request_id
            turn = session.find_turn(request_id) if request_id else None
            if turn is not None:
                require_repeat(turn, self._question)
                return await self._replay(session, turn)
            return await self._answer_in_session(session, lease, store)

    async def _replay(self, session: Session, turn: Turn) -> Finished:
        for event in replay_turn(session, turn, trace_id=self._trace_id):
            await self._events.put(event)
        return restore_finished(session, turn, trace_id=self._trace_id, tally=self._tally)

    def _get_store(self) -> SessionStore:
        if self._resources.sessions is None:
            raise FailedPrecondition(
                "this service has no session store; ask without session_id", reason="NO_SESSIONS"
            )
        return self._resources.sessions

    async def _answer_in_session(
        self, session: Session, lease: SessionLease, store: SessionStore
    ) -> Finished:
        """Answer, and save the turn whatever happens: whole, or what was committed of it."""
        try:
            decoded = await self._decode(session)
        except BaseException:
            await _uninterrupted(self._save_cut_off(session, lease, store))
            raise
        with span(SpanName.SAVE_TURN):
            await _uninterrupted(self._save(session, lease, store, decoded))
        return self._finish(decoded)

    async def _decode(self, session: Session | None) -> Decoded:
        """Find passages and have the answer decoded; its text events go out meanwhile."""
        model, found, _ = await _together(
            self._resources.target_models.get(),
            self._find_passages(session),
            self._resources.drafters.settle(self._resources.tuning.connect_s),
        )
        check_biased_tokens(self._question.sampling, model.info.vocab_size)
        self._fingerprint = model.fingerprint
        num_skipped_turns: int | None = None
        while True:
            task = self._compose(session, model, found, num_skipped_turns)
            try:
                return await decode_answer(task, self._resources)
            except ContextShrunkError as exc:
                num_skipped_turns = exc.num_dropped_turns

    async def _find_passages(self, session: Session | None) -> Sequence[SourcePassage]:
        question = self._question
        if question.given_passages:
            return question.given_passages
        began = self._resources.clock()
        with span(SpanName.RETRIEVE, {SpanKey.COLLECTION.value: question.collection}) as step:
            found = await self._resources.search.search(
                question, build_query(question.text, session)
            )
            step.set_attribute(SpanKey.NUM_PASSAGES, len(found))
        self._tally.retrieval_s = self._resources.clock() - began
        return found

    def _compose(
        self,
        session: Session | None,
        model: TargetModel,
        found: Sequence[SourcePassage],
        num_skipped_turns: int | None,
    ) -> DecodingTask:
        """Compose what is read, with nothing said yet."""
        max_chars = min(MAX_HISTORY_CHARS, CHARS_PER_TOKEN * model.info.max_model_len)
        reading = compose_reading(
            self._question.text,
            found,
            session,
            max_chars=max_chars,
            num_skipped_turns=num_skipped_turns,
        )
        self._tally.drafters.clear()
        self._progress = AnswerProgress(
            self._question,
            reading,
            answer_id=self._answer_id,
            trace_id=self._trace_id,
            tokenizer=model.tokenizer,
            tally=self._tally,
            events=self._events,
        )
        return DecodingTask(
            question=self._question,
            reading=reading,
            model=model,
            answer_id=self._answer_id,
            random_key=self._random_key,
            memory=recall(session),
            progress=self._progress,
            tally=self._tally,
        )

    async def _save(
        self, session: Session, lease: SessionLease, store: SessionStore, decoded: Decoded
    ) -> None:
        assert self._progress is not None, "only a decoded answer is saved"
        turn = build_turn(self._question, self._progress, self._facts(decoded))
        await store.turn_log.append_turn(
            session.info,
            turn,
            lease=lease,
            next_passage_number=next_passage_number(session, self._progress),
        )

    async def _save_cut_off(
        self, session: Session, lease: SessionLease, store: SessionStore
    ) -> None:
        """Save the question and the text that stands, marked; nothing when no text stands."""
        progress = self._progress
        if progress is None or progress.end is not None:
            return
        seen = self._events.delivered_to_offset if self._events.is_abandoned else None
        turn = build_turn(self._question, progress, self._facts(None), max_chars=seen)
        if not turn.answer_text:
            return
        try:
            await store.turn_log.append_turn(
                session.info,
                turn,
                lease=lease,
                next_passage_number=next_passage_number(session, progress),
            )
        except SpecragError as exc:
            _log.warning("turn cut off and not saved", reason=exc.reason, error=exc.message)

    def _facts(self, decoded: Decoded | None) -> TurnFacts:
        return TurnFacts(
            answer_id=self._answer_id,
            fingerprint=self._fingerprint,
            policy=self._question.policy if decoded is None else decoded.policy,
            random_key=self._random_key,
            started_at=self._started_at,
            finished_at=datetime.now(UTC),
            memory=DraftMemory() if decoded is None else decoded.memory,
        )

    def _finish(self, decoded: Decoded) -> Finished:
        progress = self._progress
        assert progress is not None, "the answer was decoded"
        assert progress.end is not None, "the answer has ended"
        stats = self._tally.build(num_retracted_chars=progress.num_retracted_chars)
        assert self._tally.num_completion_tokens == len(progress.token_ids), "tokens are counted"
        trace.get_current_span().set_attributes(
            {
                SpanKey.POLICY.value: decoded.policy,
                SpanKey.INPUT_TOKENS.value: progress.num_prompt_tokens,
                SpanKey.OUTPUT_TOKENS.value: len(progress.token_ids),
                SpanKey.FINISH_REASONS.value: [progress.end],
                SpanKey.NUM_DRAFT_TOKENS.value: stats.num_draft_tokens,
                SpanKey.NUM_ACCEPTED_TOKENS.value: stats.num_accepted_tokens,
            }
        )
        self._log_finished(decoded, progress, stats)
        return Finished(
            end=progress.end,
            policy=decoded.policy,
            mode=self._question.mode,
            degraded=(*decoded.degraded, *_missing_passages(progress)),
            usage=progress.usage,
            stats=stats,
            session_id=self._question.session_id,
            answer_id=self._answer_id,
            trace_id=self._trace_id,
            random_key=self._random_key,
            text=progress.text,
            token_ids=tuple(progress.token_ids),
        )

    def _log_finished(self, decoded: Decoded, progress: AnswerProgress, stats: AnswerStats) -> None:
        _log.info(
            "answer finished",
            answer_id=self._answer_id,
            policy=decoded.policy,
            mode=self._question.mode,
            finish_reason=progress.end,
            prompt_tokens=progress.num_prompt_tokens,
            completion_tokens=len(progress.token_ids),
            rounds=stats.rounds,
            num_accepted_tokens=stats.num_accepted_tokens,
            num_unknown_markers=progress.num_unknown_markers,
            total_ms=round(stats.total_ms, 1),
            degraded=[f"{one.component}:{one.reason}" for one in decoded.degraded],
        )


def _missing_passages(progress: AnswerProgress) -> tuple[Degradation, ...]:
    """Return the warning that an answer rests on nothing, when it does."""
    if progress.kept:
        return ()
    detail = (
        f"none of {progress.num_dropped_passages} passages fitted the target's context"
        if progress.num_dropped_passages
        else "nothing was found"
    )
    return (Degradation(component="retriever", reason="NO_PASSAGES", detail=detail),)


async def _together(
    first: Coroutine[Any, Any, A], second: Coroutine[Any, Any, B], third: Coroutine[Any, Any, C]
) -> tuple[A, B, C]:
    """Run three steps side by side; the first failure cancels the others."""
    tasks = (
        asyncio.ensure_future(first),
        asyncio.ensure_future(second),
        asyncio.ensure_future(third),
    )
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _uninterrupted(step: Coroutine[Any, Any, None]) -> None:
    """Run a short step to its end also when this task is cancelled meanwhile."""
    task = asyncio.create_task(step)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
