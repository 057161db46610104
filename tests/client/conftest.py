"""Scripted peers: real gRPC servers that answer what a test tells them to."""

# ruff: noqa: N802 - method names are given by the protocol
from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_status import rpc_status
from specrag.v1 import (
    common_pb2,
    rag_pb2,
    rag_pb2_grpc,
    retriever_pb2,
    retriever_pb2_grpc,
)
from specrag_client.cli.run import run
from specrag_common.runtime.error_status import to_status
from specrag_common.runtime.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from specrag_common.runtime.errors import SpecragError


@dataclass
class RagScript:
    """What the scripted orchestrator sends, what it was asked, and whether it was left."""

    events: list[rag_pb2.AnswerEvent] = field(default_factory=list)
    error: SpecragError | None = None
    hold: threading.Event | None = None
    requests: list[rag_pb2.AnswerRequest] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    sessions: dict[str, list[rag_pb2.SessionTurn]] = field(default_factory=dict)


class ScriptedRag(rag_pb2_grpc.RagServiceServicer):
    """Sends the script's events; waits before the last one while ``hold`` is not set."""

    def __init__(self, script: RagScript) -> None:
        self._script = script

    def Answer(
        self, request: rag_pb2.AnswerRequest, context: grpc.ServicerContext
    ) -> Iterator[rag_pb2.AnswerResponse]:
        self._script.requests.append(request)
        context.add_callback(self._script.left.set)
        for index, event in enumerate(self._script.events):
            if self._script.hold is not None and index == len(self._script.events) - 1:
                self._script.hold.wait(20)
            yield rag_pb2.AnswerResponse(event=event)
        abort_with(context, self._script.error)

    def CancelAnswer(
        self, request: rag_pb2.CancelAnswerRequest, context: grpc.ServicerContext
    ) -> rag_pb2.CancelAnswerResponse:
        return rag_pb2.CancelAnswerResponse(was_running=request.answer_id == "answer-1")

    def ListSessions(
        self, request: rag_pb2.ListSessionsRequest, context: grpc.ServicerContext
    ) -> rag_pb2.ListSessionsResponse:
        """Send one session a page."""
        ids = sorted(self._script.sessions)
        page = int(request.page_token or 0)
        return rag_pb2.ListSessionsResponse(
            sessions=[self._session(one) for one in ids[page : page + 1]],
            next_page_token=str(page + 1) if page + 1 < len(ids) else "",
        )

    def GetSession(
        self, request: rag_pb2.GetSessionRequest, context: grpc.ServicerContext
    ) -> rag_pb2.GetSessionResponse:
        """Send one turn a page."""
        turns = self._turns(request.session_id, context)
        page = int(request.page_token or 0)
        return rag_pb2.GetSessionResponse(
            session=self._session(request.session_id),
            turns=turns[page : page + 1],
            next_page_token=str(page + 1) if page + 1 < len(turns) else "",
        )

    def DeleteSession(
        self, request: rag_pb2.DeleteSessionRequest, context: grpc.ServicerContext
    ) -> rag_pb2.DeleteSessionResponse:
        turns = self._turns(request.session_id, context)
        del self._script.sessions[request.session_id]
        return rag_pb2.DeleteSessionResponse(num_deleted_turns=len(turns))

    def _turns(self, session_id: str, context: grpc.ServicerContext) -> list[rag_pb2.SessionTurn]:
        if session_id not in self._script.sessions:
            abort_with(context, NotFound(f"no session {session_id}"))
        return self._script.sessions[session_id]

    def _session(self, session_id: str) -> rag_pb2.Session:
        return rag_pb2.Session(
            session_id=session_id, num_turns=len(self._script.sessions[session_id])
        )


class MemoryRetriever(retriever_pb2_grpc.RetrieverServiceServicer):
    """Keeps documents in a dictionary; refuses empty ones, as the real one does."""

    def __init__(self) -> None:
        self.collections: set[str] = set()
        self.documents: dict[str, bytes] = {}
        self.batch_sizes: list[int] = []
        self.failures_left = 0
        self.failure: SpecragError | None = None

    def GetCollection(
        self, request: retriever_pb2.GetCollectionRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.GetCollectionResponse:
        if request.name not in self.collections:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no collection {request.name}")
        return retriever_pb2.GetCollectionResponse()

    def CreateCollection(
        self, request: retriever_pb2.CreateCollectionRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.CreateCollectionResponse:
        self.collections.add(request.name)
        return retriever_pb2.CreateCollectionResponse()

    def UpsertDocuments(
        self,
        request_iterator: Iterator[retriever_pb2.UpsertDocumentsRequest],
        context: grpc.ServicerContext,
    ) -> retriever_pb2.UpsertDocumentsResponse:
        received: dict[str, bytearray] = {}
        current = bytearray()
        for request in request_iterator:
            if request.WhichOneof("message") == "start":
                current = received.setdefault(request.start.document_id, bytearray())
            current += request.data
        if self.failures_left:
            self.failures_left -= 1
            abort_with(context, self.failure)
        self.batch_sizes.append(len(received))
        self.documents |= {name: bytes(data) for name, data in received.items()}
        return retriever_pb2.UpsertDocumentsResponse(
            results=[_document_result(name, bytes(data)) for name, data in received.items()]
        )

    def Search(
        self, request: retriever_pb2.SearchRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.SearchResponse:
        if request.collection not in self.collections:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no collection {request.collection}")
        return retriever_pb2.SearchResponse(passages=[wire_passage(0)])

    def ListCollections(
        self, request: retriever_pb2.ListCollectionsRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.ListCollectionsResponse:
        names = sorted(self.collections)
        return retriever_pb2.ListCollectionsResponse(
            collections=[retriever_pb2.Collection(name=one) for one in names]
        )

    def DeleteCollection(
        self, request: retriever_pb2.DeleteCollectionRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.DeleteCollectionResponse:
        self.collections.discard(request.name)
        return retriever_pb2.DeleteCollectionResponse()

    def DeleteDocuments(
        self, request: retriever_pb2.DeleteDocumentsRequest, context: grpc.ServicerContext
    ) -> retriever_pb2.DeleteDocumentsResponse:
        found = [one for one in request.document_ids if self.documents.pop(one, None) is not None]
        return retriever_pb2.DeleteDocumentsResponse(num_deleted_documents=len(found))


def _document_result(name: str, data: bytes) -> retriever_pb2.DocumentResult:
    if not data:
        return retriever_pb2.DocumentResult(
            document_id=name,
            status=retriever_pb2.DOCUMENT_STATUS_SKIPPED,
            reason="EMPTY",
            detail="it has no content",
        )
    return retriever_pb2.DocumentResult(
        document_id=name, status=retriever_pb2.DOCUMENT_STATUS_INDEXED, num_passages=2
    )


def abort_with(context: grpc.ServicerContext, error: SpecragError | None) -> None:
    """End a call as our services do."""
    if error is not None:
        context.abort_with_status(rpc_status.to_status(to_status(error)))


def wire_passage(number: int) -> common_pb2.Passage:
    """Return a passage of a handbook."""
    return common_pb2.Passage(
        chunk_id=f"leave.md#{number}",
        document_id="leave.md",
        title="Annual leave",
        uri="leave.md",
        text="Your team lead approves leave.",
        start_char=0,
        end_char=30,
        score=0.5,
        number=number,
    )


def retrieval_event(seq: int = 1) -> rag_pb2.AnswerEvent:
    """Return the first event of an answer."""
    return rag_pb2.AnswerEvent(
        seq=seq,
        retrieval_done=rag_pb2.RetrievalDone(
            passages=[wire_passage(1)], answer_id="answer-1", trace_id="ab" * 16
        ),
    )


def finished_event(seq: int, answer: str, **fields: Any) -> rag_pb2.AnswerEvent:
    """Return the last event of an answer."""
    finished = rag_pb2.Finished(
        finish_reason=common_pb2.FINISH_REASON_STOP,
        policy=rag_pb2.ANSWER_POLICY_JOINT,
        mode=common_pb2.VERIFICATION_MODE_COUPLED,
        usage=rag_pb2.Usage(prompt_tokens=100, cached_tokens=10, completion_tokens=3),
        stats=rag_pb2.AnswerStats(
            rounds=2,
            num_draft_tokens=4,
            num_accepted_tokens=1,
            mean_acceptance_length=1.5,
            time_to_first_speculative_token_ms=12.0,
            time_to_first_token_ms=34.5678,
            total_ms=56.0,
            tokens_per_s=20.0,
            per_drafter=[rag_pb2.DrafterStats(drafter_index=0, address="127.0.0.1:1")],
        ),
        answer_id="answer-1",
        trace_id="ab" * 16,
        random_key=bytes(range(16)),
        answer=answer,
        token_ids=struct.pack("<3i", 5, 6, 7),
    )
    finished.MergeFrom(rag_pb2.Finished(**fields))
    return rag_pb2.AnswerEvent(seq=seq, finished=finished)


def answer_script() -> list[rag_pb2.AnswerEvent]:
    """Return an answer with a wrong guess that is taken back, in CJK and emoji."""
    event = rag_pb2.AnswerEvent
    return [
        retrieval_event(),
        event(seq=2, speculative=rag_pb2.Speculative(offset=0, text="猫が好")),
        event(seq=3, speculative=rag_pb2.Speculative(offset=3, text="きです")),
        event(seq=4, retract=rag_pb2.Retract(to_offset=2)),
        event(seq=5, commit=rag_pb2.Commit(to_offset=4, text="猫が🐟を")),
        event(seq=6, speculative=rag_pb2.Speculative(offset=4, text="食べる")),
        event(seq=7, commit=rag_pb2.Commit(to_offset=7, text="食べる")),
        event(
            seq=8,
            citation=rag_pb2.Citation(
                number=1,
                chunk_id="leave.md#1",
                document_id="leave.md",
                title="Annual leave",
                start=0,
                end=7,
                support=0.5,
                method=rag_pb2.CITATION_METHOD_INLINE,
            ),
        ),
        finished_event(9, "猫が🐟を食べる"),
    ]


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[grpc.Server], None]], str]]:
    """Return a function that starts a gRPC server with what its argument adds."""
    servers: list[grpc.Server] = []

    def start(add: Callable[[grpc.Server], None]) -> str:
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        add(server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(grace=0).wait()


@pytest.fixture
def rag_script() -> RagScript:
    """What the scripted orchestrator does; tests change it before they ask."""
    return RagScript(events=answer_script())


@pytest.fixture
def make_finished() -> Callable[..., rag_pb2.AnswerEvent]:
    """Return :func:`finished_event`."""
    return finished_event


@pytest.fixture
def orchestrator(
    serve: Callable[[Callable[[grpc.Server], None]], str], rag_script: RagScript
) -> str:
    """Address of a scripted orchestrator."""
    return serve(
        lambda server: rag_pb2_grpc.add_RagServiceServicer_to_server(
            ScriptedRag(rag_script), server
        )
    )


@pytest.fixture
def memory_retriever() -> MemoryRetriever:
    """What the retriever holds."""
    return MemoryRetriever()


@pytest.fixture
def retriever(
    serve: Callable[[Callable[[grpc.Server], None]], str], memory_retriever: MemoryRetriever
) -> str:
    """Address of a retriever that keeps documents in memory."""
    return serve(
        lambda server: retriever_pb2_grpc.add_RetrieverServiceServicer_to_server(
            memory_retriever, server
        )
    )


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def specrag(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Return a function that runs a command in this process."""

    def execute(*arguments: str) -> Outcome:
        code = run(arguments_of(arguments))
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return execute


def arguments_of(arguments: Sequence[str]) -> list[str]:
    """Return arguments as text."""
    return [str(one) for one in arguments]
