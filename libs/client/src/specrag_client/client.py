"""The product from Python: ask questions, read and delete sessions."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2, rag_pb2, rag_pb2_grpc
from specrag_common.runtime.client_calls import cancelling
from specrag_common.runtime.errors import DataLoss

from specrag_client.answer_text import AnswerText, ReplayError
from specrag_client.connection import ServiceConnection
from specrag_client.convert import WIRE_MODES, WIRE_POLICIES, to_event
from specrag_client.events import (
    AnswerResult,
    Citation,
    Finished,
    Policy,
    RetrievalDone,
    TokenLogprob,
    TokenLogprobs,
    VerificationMode,
)
from specrag_client.sessions import Session, SessionPage, SessionTurns, to_session, to_turn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from specrag_client.events import AnswerEvent

_IDEMPOTENT: Final = tuple(
    f"specrag.v1.RagService/{method}" for method in ("GetSession", "ListSessions", "CancelAnswer")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Everything about a question but the question. ``None`` leaves a choice to the service.

    Attributes:
        tenant: whose documents and sessions; empty: ``default``.
        session_id: session to continue or begin; empty: nothing is remembered.
        policy: how the answer comes about.
        mode: how the target verifies; by default by whether there is a seed.
        temperature: 0 (greedy) to 2.
        top_p: over 0 to 1.
        top_k: 0 (off) or more.
        min_p: 0 (off) to 1 of the most likely token's probability; less likely ones are ruled out.
        repetition_penalty: 0.1 to 10; over 1 discourages tokens of prompt and answer.
        presence_penalty: -2 to 2; over 0 discourages tokens of the answer.
        frequency_penalty: -2 to 2; over 0 discourages tokens the more often the answer has them.
        logit_bias: token id to what is added to its logit, -100 to 100.
        max_tokens: 1 to 4096.
        min_tokens: tokens before the answer may end by itself, 0 to ``max_tokens``.
        stop: up to 8 strings; the answer ends before the first found.
        num_top_logprobs: 0 to 20: report log-probabilities of the answer's tokens, and of so many
            likely ones in place of each.
        seed: same seed, same request: same tokens.
        num_passages: passages to read, 1 to 30.
        num_drafters: drafters to use, 1 to 16.
        max_gamma: most draft tokens a branch, 1 to 64.
        request_id: idempotency key; a repeat within a session replays the turn.
        allow_fallback: answer without drafters when none is left.
        timeout_s: longest time for the whole answer.
    """

    tenant: str = ""
    session_id: str = ""
    policy: Policy = Policy.UNSPECIFIED
    mode: VerificationMode = VerificationMode.UNSPECIFIED
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: tuple[str, ...] = field(default=())
    num_top_logprobs: int | None = None
    seed: int | None = None
    num_passages: int | None = None
    num_drafters: int | None = None
    max_gamma: int | None = None
    request_id: str = ""
    allow_fallback: bool | None = None
    timeout_s: float = 600.0


class SpecragClient(ServiceConnection):
    """A connection to one orchestrator; use it as an async context manager.

    Every method raises :class:`specrag_common.runtime.errors.SpecragError` when the service
    refuses or fails.
    """

    def __init__(self, endpoint: str) -> None:
        """Open a channel to ``HOST:PORT``; it connects on the first call.

        Raises:
            AddressError: the endpoint is no ``HOST:PORT``.
        """
        super().__init__(endpoint, _IDEMPOTENT)
        self._stub = rag_pb2_grpc.RagServiceStub(self._channel)

    async def answer(
        self,
        question: str,
        *,
        collection: str,
        options: AnswerOptions | None = None,
        include_speculative: bool = True,
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Ask a question and yield its events; ``Finished`` comes last.

        Closing the iterator, or cancelling the task that reads it, cancels the answer everywhere.
        """
        request = answer_request(
            question, collection, options or AnswerOptions(), speculative=include_speculative
        )
        timeout_s = (options or AnswerOptions()).timeout_s
        with cancelling(self._stub.Answer(request, timeout=timeout_s)) as call:
            async for response in call:
                event = to_event(response.event)
                if event is not None:
                    yield event

    async def ask(
        self, question: str, *, collection: str, options: AnswerOptions | None = None
    ) -> AnswerResult:
        """Ask a question and return the whole answer."""
        stream = self.answer(
            question, collection=collection, options=options, include_speculative=False
        )
        async with aclosing(stream):
            collector = AnswerCollector()
            async for event in stream:
                collector.add(event)
        return collector.result()

    async def cancel_answer(self, answer_id: str, *, tenant: str = "") -> bool:
        """Stop a running answer; tell whether it ran."""
        response = await self._stub.CancelAnswer(
            rag_pb2.CancelAnswerRequest(answer_id=answer_id, tenant=tenant)
        )
        return response.was_running

    async def list_sessions(
        self, *, tenant: str = "", page_size: int | None = None, page_token: str = ""
    ) -> SessionPage:
        """Return one page of a tenant's sessions, newest first."""
        response = await self._stub.ListSessions(
            rag_pb2.ListSessionsRequest(tenant=tenant, page_size=page_size, page_token=page_token)
        )
        return SessionPage(
            sessions=tuple(map(to_session, response.sessions)),
            next_page_token=response.next_page_token,
        )

    async def get_session(
        self,
        session_id: str,
        *,
        tenant: str = "",
        page_size: int | None = None,
        page_token: str = "",
    ) -> SessionTurns:
        """Return a session and one page of its turns, oldest first."""
        response = await self._stub.GetSession(
            rag_pb2.GetSessionRequest(
                session_id=session_id, tenant=tenant, page_size=page_size, page_token=page_token
            )
        )
        session: Session = to_session(response.session)
        return SessionTurns(
            session=session,
            turns=tuple(map(to_turn, response.turns)),
            next_page_token=response.next_page_token,
        )

    async def delete_session(self, session_id: str, *, tenant: str = "") -> int:
        """Delete a session with all its turns; return how many those were."""
        response = await self._stub.DeleteSession(
            rag_pb2.DeleteSessionRequest(session_id=session_id, tenant=tenant)
        )
        return response.num_deleted_turns


class AnswerCollector:
    """Puts an answer's events together, and holds them against each other."""

    def __init__(self) -> None:
        self._text = AnswerText()
        self._retrieval: RetrievalDone | None = None
        self._citations: list[Citation] = []
        self._logprobs: list[TokenLogprob] = []
        self._finished: Finished | None = None

    def add(self, event: AnswerEvent) -> None:
        """Take the next event.

        Raises:
            ReplayError: the event does not fit what came before.
        """
        match event:
            case RetrievalDone():
                self._retrieval = event
            case Citation():
                self._citations.append(event)
            case TokenLogprobs():
                self._take_logprobs(event)
            case Finished():
                self._finished = event
            case _:
                self._text.apply(event)

    def result(self) -> AnswerResult:
        """Return the whole answer.

        Raises:
            DataLoss: the stream ended early, or its text is not the final text.
        """
        if self._retrieval is None or self._finished is None:
            raise DataLoss("the stream of events ended before the answer was finished")
        if self._text.committed != self._finished.answer:
            raise DataLoss("the streamed text differs from the answer the service reports")
        if self._logprobs:
            ids = tuple(token.token_id for token in self._logprobs)
            if ids != self._finished.token_ids:
                raise DataLoss("log-probabilities were sent for other tokens than the answer's")
        return AnswerResult(
            finished=self._finished,
            retrieval=self._retrieval,
            citations=tuple(self._citations),
            logprobs=tuple(self._logprobs),
        )

    def _take_logprobs(self, event: TokenLogprobs) -> None:
        if event.first_token != len(self._logprobs):
            raise ReplayError(
                f"log-probabilities of token {event.first_token} follow those of "
                f"{len(self._logprobs)} tokens"
            )
        self._logprobs += event.tokens


def answer_request(
    question: str, collection: str, options: AnswerOptions, *, speculative: bool
) -> rag_pb2.AnswerRequest:
    """Return the message for a question; what is ``None`` stays absent."""
    return rag_pb2.AnswerRequest(
        question=question,
        collection=collection,
        tenant=options.tenant,
        session_id=options.session_id,
        policy=WIRE_POLICIES[options.policy],
        mode=WIRE_MODES[options.mode],
        sampling=common_pb2.SamplingParams(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            logit_bias=options.logit_bias,
            max_tokens=options.max_tokens,
            min_tokens=options.min_tokens,
            stop=options.stop,
            num_top_logprobs=options.num_top_logprobs,
        ),
        seed=options.seed,
        num_passages=options.num_passages,
        draft=rag_pb2.DraftOptions(num_drafters=options.num_drafters, max_gamma=options.max_gamma),
        include_speculative=speculative,
        request_id=options.request_id,
        allow_fallback=options.allow_fallback,
    )
