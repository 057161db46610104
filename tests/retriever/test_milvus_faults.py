"""Milvus killed, missing, or silent."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import grpc
import pytest
from specrag.v1 import retriever_pb2 as pb
from specrag_retriever.servicer import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.retriever.serving import LiteServer, Retriever, StartRetriever

pytestmark = pytest.mark.integration


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that takes connections and never says a word."""
    with socket.socket() as sink:
        sink.bind(("127.0.0.1", 0))
        sink.listen(16)
        yield f"http://127.0.0.1:{sink.getsockname()[1]}"


async def wait_ready(retriever: Retriever, *, ready: bool) -> None:
    async with asyncio.timeout(20):
        while retriever.server.health.is_ready(SERVICE_NAME) is not ready:  # noqa: ASYNC110 - remote
            await asyncio.sleep(0.05)


async def wait_answering(retriever: Retriever) -> None:
    """Return once the service reaches Milvus again; five seconds are allowed."""
    request = pb.GetCollectionRequest(name=retriever.collection)
    async with asyncio.timeout(5):
        while True:
            try:
                await retriever.stub.GetCollection(request, timeout=1)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.05)
            else:
                return


async def test_silent_milvus_ends_in_deadline_exceeded_on_time(
    start_retriever: StartRetriever, black_hole: str
) -> None:
    retriever = await start_retriever(black_hole)
    request = pb.SearchRequest(collection="docs", query="x")
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await retriever.stub.Search(request, timeout=1.0)
    assert time.monotonic() - began < 1.5
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_silent_milvus_ends_in_unavailable_without_a_deadline(
    start_retriever: StartRetriever, black_hole: str
) -> None:
    retriever = await start_retriever(black_hole)
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await retriever.stub.Search(pb.SearchRequest(collection="docs", query="x"))
    assert time.monotonic() - began < 11
    assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_milvus_missing_at_the_start_is_unavailable_until_it_comes(
    start_retriever: StartRetriever, own_lite: LiteServer
) -> None:
    retriever = await start_retriever(own_lite.uri)
    watch = asyncio.create_task(retriever.core.watch_milvus())
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await retriever.create()
    assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not retriever.server.health.is_ready(SERVICE_NAME)
    await asyncio.to_thread(own_lite.start)
    await wait_ready(retriever, ready=True)
    await retriever.create()
    await retriever.upsert({"a": "here at last"})
    assert await retriever.found_ids("here") == ["a"]
    own_lite.kill()
    await wait_ready(retriever, ready=False)
    watch.cancel()


async def test_acknowledged_documents_survive_kill_9_during_ingestion(
    start_retriever: StartRetriever, own_lite: LiteServer
) -> None:
    await asyncio.to_thread(own_lite.start)
    retriever = await start_retriever(own_lite.uri)
    await retriever.create()
    acknowledged: list[str] = []

    async def ingest() -> None:
        for part in range(1000):
            documents: dict[str, str | bytes] = {
                f"d{part}-{index}": f"marker{part}x{index} and more text" for index in range(5)
            }
            acknowledged.extend(one.document_id for one in await retriever.upsert(documents))

    ingesting = asyncio.create_task(ingest())
    while len(acknowledged) < 40:  # noqa: ASYNC110 - filled by another task
        await asyncio.sleep(0.02)
    own_lite.kill()
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await ingesting
    assert gone.value.code() is grpc.StatusCode.UNAVAILABLE
    await asyncio.to_thread(own_lite.start)
    await wait_answering(retriever)

    for document_id in acknowledged:
        marker = document_id.replace("d", "marker").replace("-", "x")
        assert (await retriever.found_ids(marker, top_k=1)) == [document_id]
    num_documents, _ = await retriever.counts()
    assert len(acknowledged) <= num_documents <= len(acknowledged) + 5
    results = await retriever.upsert(dict.fromkeys(acknowledged[:3], "x"))
    assert [one.status for one in results] == [pb.DOCUMENT_STATUS_INDEXED] * 3


async def test_failed_replacement_shows_the_former_version_only(
    start_retriever: StartRetriever, own_lite: LiteServer
) -> None:
    await asyncio.to_thread(own_lite.start)
    retriever = await start_retriever(own_lite.uri)
    await retriever.create()
    await retriever.upsert({"a": "the former version"})
    own_lite.kill()
    with pytest.raises(grpc.aio.AioRpcError):
        await retriever.upsert({"a": "the later version"})
    await asyncio.to_thread(own_lite.start)
    await wait_answering(retriever)
    response = await retriever.search("version")
    assert [one.text for one in response.passages] == ["the former version"]
    await retriever.upsert({"a": "the later version"})
    response = await retriever.search("version")
    assert [one.text for one in response.passages] == ["the later version"]
