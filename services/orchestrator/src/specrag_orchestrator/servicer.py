"""``RagService`` over gRPC: requests in, domain calls, messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from specrag.v1 import rag_pb2, rag_pb2_grpc
from specrag_common.runtime.errors import FailedPrecondition, InvalidRequest
from specrag_common.sessions.model import SessionKey

from specrag_orchestrator.convert import encode_event, encode_session, encode_turns
from specrag_orchestrator.requests import (
    decode_answer_id,
    decode_page_size,
    decode_question,
    decode_session_id,
    decode_tenant,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import grpc
    from specrag_common.sessions.turn_log import TurnLog

    from specrag_orchestrator.answering.resources import SessionStore
    from specrag_orchestrator.answering.service import AnswerService

    Context = grpc.aio.ServicerContext[Any, Any]

SERVICE: Final = "specrag.v1.RagService"


class RagServicer(rag_pb2_grpc.RagServiceServicer):
    """Serves answers and sessions."""

    def __init__(self, answers: AnswerService, sessions: SessionStore | None) -> None:
        """Serve from ``answers``; without ``sessions`` the session methods are refused."""
        self._answers = answers
        self._sessions = sessions

    async def Answer(  # noqa: N802 - name given by the protocol
        self, request: rag_pb2.AnswerRequest, context: Context
    ) -> AsyncIterator[rag_pb2.AnswerResponse]:
        """Stream one answer's events; whatever ends the stream ends the answer."""
        running = self._answers.start(decode_question(request))
        context.add_done_callback(running.on_rpc_done)  # type: ignore[arg-type] # stub of grpc
        seq = 0
        try:
            async for event in running.events:
                seq += 1
                yield encode_event(event, seq)
        finally:
            running.leave()

    async def CancelAnswer(  # noqa: N802 - name given by the protocol
        self, request: rag_pb2.CancelAnswerRequest, _context: Context
    ) -> rag_pb2.CancelAnswerResponse:
        """Stop a running answer; its stream ends CANCELLED once the partial turn is saved."""
        answer_id = decode_answer_id(request.answer_id)
        was_running = await self._answers.cancel(decode_tenant(request.tenant), answer_id)
        return rag_pb2.CancelAnswerResponse(was_running=was_running)

    async def GetSession(  # noqa: N802 - name given by the protocol
        self, request: rag_pb2.GetSessionRequest, _context: Context
    ) -> rag_pb2.GetSessionResponse:
        """Return a session and one page of its turns, oldest first."""
        key = _decode_key(request.tenant, request.session_id)
        page_size = decode_page_size(request)
        first = _decode_turn_token(request.page_token)
        session = await self._get_turn_log().read_session(key)
        end = first + page_size
        return rag_pb2.GetSessionResponse(
            session=encode_session(session.info),
            turns=encode_turns(session, first, page_size),
            next_page_token=str(end) if end < len(session.turns) else "",
        )

    async def ListSessions(  # noqa: N802 - name given by the protocol
        self, request: rag_pb2.ListSessionsRequest, _context: Context
    ) -> rag_pb2.ListSessionsResponse:
        """Return one page of a tenant's sessions, the last changed first."""
        page = await self._get_turn_log().list_sessions(
            tenant=decode_tenant(request.tenant),
            page_size=decode_page_size(request),
            page_token=request.page_token,
        )
        return rag_pb2.ListSessionsResponse(
            sessions=[encode_session(info) for info in page.sessions],
            next_page_token=page.next_page_token,
        )

    async def DeleteSession(  # noqa: N802 - name given by the protocol
        self, request: rag_pb2.DeleteSessionRequest, _context: Context
    ) -> rag_pb2.DeleteSessionResponse:
        """Erase a session with all its turns."""
        key = _decode_key(request.tenant, request.session_id)
        turn_log = self._get_turn_log()
        session = await turn_log.read_session(key)
        await turn_log.delete_session(key)
        return rag_pb2.DeleteSessionResponse(num_deleted_turns=session.info.num_turns)

    def _get_turn_log(self) -> TurnLog:
        if self._sessions is None:
            raise FailedPrecondition("this service has no session store", reason="NO_SESSIONS")
        return self._sessions.turn_log


def _decode_key(tenant: str, session_id: str) -> SessionKey:
    return SessionKey(tenant=decode_tenant(tenant), session_id=decode_session_id(session_id))


def _decode_turn_token(token: str) -> int:
    """Return the index of the first turn of a page.

    Raises:
        InvalidRequest: the token is none that was given out.
    """
    if not token:
        return 0
    if not (token.isascii() and token.isdigit() and len(token) <= 9):
        raise InvalidRequest("page_token", "is not a token of an earlier response")
    return int(token)
