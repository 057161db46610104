"""The whole process, as it is deployed: ``python -m specrag_retriever``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TYPE_CHECKING

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import retriever_pb2 as pb
from specrag.v1.retriever_pb2_grpc import RetrieverServiceStub
from specrag_retriever.servicer import SERVICE_NAME

from tests.retriever.serving import EMBEDDER_REFERENCE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.retriever.serving import LiteServer

pytestmark = pytest.mark.integration


async def start_process(tmp_path: Path, **settings: str) -> asyncio.subprocess.Process:
    environment = {
        **os.environ,  # noqa: TID251 - handed on to the process under test
        "SPECRAG_RETRIEVER_PORT_FILE": str(tmp_path / "port"),
        "SPECRAG_RETRIEVER_MODEL_CACHE_DIR": str(tmp_path / "models"),
        "SPECRAG_RETRIEVER_PASSAGE_TOKENIZER": EMBEDDER_REFERENCE,
        "SPECRAG_RETRIEVER_NUM_THREADS": "1",
        "SPECRAG_RETRIEVER_DRAIN_NOTICE_S": "0",
        **{f"SPECRAG_RETRIEVER_{name}": value for name, value in settings.items()},
    }
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "specrag_retriever", env=environment,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def wait_serving(channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    async with asyncio.timeout(60):
        async for response in stub.Watch(request):
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def test_process_serves_until_sigterm_and_exits_0(lite: LiteServer, tmp_path: Path) -> None:
    process = await start_process(tmp_path, MILVUS_URI=lite.uri)
    port_file = tmp_path / "port"
    async with asyncio.timeout(60):
        while not port_file.exists():  # noqa: ASYNC110 - written by another process
            await asyncio.sleep(0.05)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port_file.read_text()}") as channel:
        await wait_serving(channel)
        stub = RetrieverServiceStub(channel)
        created = await stub.CreateCollection(pb.CreateCollectionRequest(name="process"))
        assert created.collection.embedding_dim == 384
        data = b"# Leave\n\nEmployees get 27 days of holiday a year."
        messages = [
            pb.UpsertDocumentsRequest(open=pb.OpenUpsert(collection="process")),
            pb.UpsertDocumentsRequest(
                start=pb.DocumentStart(document_id="a", uri="a.md", size_bytes=len(data))
            ),
            pb.UpsertDocumentsRequest(data=data),
        ]
        await stub.UpsertDocuments(iter(messages))
        search = pb.SearchRequest(collection="process", query="How much vacation is there?")
        passage = (await stub.Search(search)).passages[0]
        assert (passage.title, passage.text) == ("Leave", data.decode().removeprefix("# "))
    process.send_signal(signal.SIGTERM)
    _, stderr = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0, stderr.decode()
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("settings", "exit_code", "message"),
    [
        ({"EMBEDDER": "package:no_such_package/model"}, 1, b"no_such_package"),
        ({"MILVUS_URI": "nonsense"}, 2, b"SPECRAG_RETRIEVER_MILVUS_URI"),
        ({"MILVUS_URL": "http://x"}, 2, b"did you mean SPECRAG_RETRIEVER_MILVUS_URI"),
    ],
)
async def test_bad_settings_end_the_process_with_one_clear_line(
    tmp_path: Path, settings: dict[str, str], exit_code: int, message: bytes
) -> None:
    process = await start_process(tmp_path, **settings)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == exit_code
    assert message in stderr
    assert b"Traceback" not in stderr
