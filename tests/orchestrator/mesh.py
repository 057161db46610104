"""A small mesh in one process: the real orchestrator over scripted model services."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specrag.v1 import (
    common_pb2,
    drafter_pb2_grpc,
    rag_pb2,
    rag_pb2_grpc,
    retriever_pb2,
    retriever_pb2_grpc,
    verifier_pb2_grpc,
)
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import NotFound, SpecragError
from specrag_common.runtime.lifecycle import Lifecycle
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.settings import ServiceSettings
from specrag_orchestrator.answering.transcript import Commit, Retract, Speculative
from specrag_orchestrator.hosting import start_orchestrator
from specrag_orchestrator.settings import OrchestratorSettings

from tests.orchestrator.byte_tokenizer import StrictReplay
from tests.orchestrator.scripted_target import (
    DRAFTER,
    VERIFIER,
    DraftScript,
    ScriptedDrafter,
    ScriptedVerifier,
    TargetScript,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

RETRIEVER = "specrag.v1.RetrieverService"


class ListedRetriever(retriever_pb2_grpc.RetrieverServiceServicer):
    """Finds the listed passages of one collection, whatever is asked; remembers the queries."""

    def __init__(self) -> None:
        self.passages: list[common_pb2.Passage] = []
        self.queries: list[str] = []
        self.error: SpecragError | None = None
        self.delay_s = 0.0

    async def Search(  # noqa: N802 - name given by the protocol
        self, request: retriever_pb2.SearchRequest, context: Any
    ) -> retriever_pb2.SearchResponse:
        self.queries.append(request.query)
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        if request.collection != "handbook":
            raise NotFound(f"no collection {request.collection!r}", reason="COLLECTION_NOT_FOUND")
        return retriever_pb2.SearchResponse(passages=self.passages[: request.top_k])


@dataclass
class Mesh:
    """The running services of a test."""

    stub: rag_pb2_grpc.RagServiceAsyncStub
    verifier: ScriptedVerifier
    drafters: list[ScriptedDrafter]
    retriever: ListedRetriever
    drafter_servers: list[GrpcServer]
    verifier_server: GrpcServer
    port: int

    async def stop_verifier(self) -> None:
        await self.verifier_server.grpc.stop(0)

    @contextlib.asynccontextmanager
    async def restart_drafter(self, port: int) -> AsyncIterator[None]:
        """Serve drafter 0 again on its old port."""
        server = make_server(DRAFTER, port=port)
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self.drafters[0], server.grpc)
        async with contextlib.AsyncExitStack() as stack:
            await start_server(server, stack)
            yield

    async def ask(self, **fields: Any) -> Answered:
        """Ask and collect the events; an error is collected too."""
        answered = Answered()
        try:
            async for response in self.stub.Answer(make_request(**fields), timeout=20):
                answered.take(response.event)
        except SpecragError as exc:
            answered.error = exc
        return answered

    def open(self, **fields: Any) -> Any:
        """Return the call of an answer, to be read step by step."""
        return self.stub.Answer(make_request(**fields), timeout=20)

    async def wait_idle(self, timeout_s: float = 1.0) -> None:
        """Return once no model service serves a stream."""
        async with asyncio.timeout(timeout_s):
            while self.verifier.num_open or any(one.num_open for one in self.drafters):  # noqa: ASYNC110 - counts of other servers
                await asyncio.sleep(0.005)


@dataclass
class Answered:
    """The events of one answer, replayed."""

    events: list[rag_pb2.AnswerEvent] = field(default_factory=list)
    replay: StrictReplay = field(default_factory=StrictReplay)
    error: SpecragError | None = None

    def take(self, event: rag_pb2.AnswerEvent) -> None:
        assert event.seq == len(self.events) + 1, "seq rises by one from 1"
        assert not self.events or not self.events[-1].HasField("finished"), "nothing follows"
        self.events.append(event)
        kind = event.WhichOneof("event")
        if kind == "speculative":
            self.replay.apply(
                Speculative(offset=event.speculative.offset, text=event.speculative.text)
            )
        elif kind == "retract":
            self.replay.apply(Retract(to_offset=event.retract.to_offset))
        elif kind == "commit":
            self.replay.apply(Commit(to_offset=event.commit.to_offset, text=event.commit.text))

    def of_kind(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.events if one.HasField(kind)]  # type: ignore[arg-type]

    @property
    def retrieval(self) -> rag_pb2.RetrievalDone:
        assert self.events[0].HasField("retrieval_done"), "the passages come first"
        return self.events[0].retrieval_done

    @property
    def finished(self) -> rag_pb2.Finished:
        assert self.error is None, f"the answer failed: {self.error}"
        assert self.events[-1].HasField("finished")
        return self.events[-1].finished

    @property
    def text(self) -> str:
        assert self.replay.speculative == "", "nothing speculative is left"
        return self.replay.committed


def make_request(**fields: Any) -> rag_pb2.AnswerRequest:
    """Return a question; without a source it brings one passage along."""
    fields.setdefault("question", "What?")
    if "collection" not in fields:
        fields.setdefault("passages", [make_passage("c1", "Nothing to see here.")])
    return rag_pb2.AnswerRequest(**fields)


def make_passage(chunk_id: str, text: str, **fields: Any) -> common_pb2.Passage:
    return common_pb2.Passage(
        chunk_id=chunk_id,
        document_id=f"doc-{chunk_id}",
        title=f"Title {chunk_id}",
        text=text,
        **fields,
    )


def make_passages(count: int) -> list[common_pb2.Passage]:
    return [make_passage(f"c{idx}", f"Passage number {idx} of many.") for idx in range(count)]


@contextlib.asynccontextmanager
async def running_mesh(
    target: TargetScript, drafts: Sequence[DraftScript] = (), **settings: Any
) -> AsyncIterator[Mesh]:
    """Run the orchestrator and its scripted services on free ports."""
    async with contextlib.AsyncExitStack() as stack:
        verifier = ScriptedVerifier(target)
        retriever = ListedRetriever()  # type: ignore[abstract] # only searches are served
        verifier_server = make_server(VERIFIER)
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, verifier_server.grpc)
        retriever_server = make_server(RETRIEVER)
        retriever_pb2_grpc.add_RetrieverServiceServicer_to_server(retriever, retriever_server.grpc)
        drafters = [ScriptedDrafter(script) for script in drafts]
        drafter_servers = []
        for drafter in drafters:
            server = make_server(DRAFTER)
            drafter_pb2_grpc.add_DrafterServiceServicer_to_server(drafter, server.grpc)
            drafter_servers.append(server)
        for server in (verifier_server, retriever_server, *drafter_servers):
            await start_server(server, stack)
        addresses = [f"127.0.0.1:{server.port}" for server in drafter_servers]
        settings.setdefault("drafter_addresses", tuple(addresses))
        lifecycle = Lifecycle()
        stack.push_async_callback(lifecycle.close)
        server = await start_orchestrator(
            OrchestratorSettings(
                retriever_address=f"127.0.0.1:{retriever_server.port}",
                verifier_address=f"127.0.0.1:{verifier_server.port}",
                drain_notice_s=0.0,
                drain_grace_s=5.0,
                **settings,
            ),
            lifecycle,
        )
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        stub: rag_pb2_grpc.RagServiceAsyncStub = rag_pb2_grpc.RagServiceStub(channel)
        yield Mesh(
            stub, verifier, drafters, retriever, drafter_servers, verifier_server, server.port
        )


def make_server(service: str, *, port: int = 0) -> GrpcServer:
    settings = ServiceSettings(port=port, drain_notice_s=0.0, drain_grace_s=0.5)
    return GrpcServer(settings, services=[service])


async def start_server(server: GrpcServer, stack: contextlib.AsyncExitStack) -> None:
    await stack.enter_async_context(server)
    for service in (VERIFIER, DRAFTER, RETRIEVER):
        server.set_ready(service)
