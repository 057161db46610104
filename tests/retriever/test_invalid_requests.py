"""Requests out of range are INVALID_ARGUMENT and name the field."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from specrag.v1 import retriever_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from tests.retriever.serving import Retriever

pytestmark = pytest.mark.integration


async def refused_fields(call: Awaitable[object]) -> set[str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, refused.value.details()
    status = rpc_status.from_call(refused.value)
    fields: set[str] = set()
    for detail in status.details:
        bad_request = error_details_pb2.BadRequest()
        if detail.Unpack(bad_request):
            fields |= {one.field for one in bad_request.field_violations}
    return fields


def filter_of(field: str, operator: int, values: Sequence[str]) -> pb.FilterCondition:
    return pb.FilterCondition(field=field, operator=operator, values=values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"query": ""}, "query"),
        ({"query": " \n\t"}, "query"),
        ({"query": "x" * 8193}, "query"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 101}, "top_k"),
        ({"collection": "Bad-Name"}, "collection"),
        ({"collection": ""}, "collection"),
        ({"collection": "a" * 64}, "collection"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"tenant": "a\nb"}, "tenant"),
        ({"filters": [filter_of("lang", 0, ["x"])]}, "filters[0].operator"),
        ({"filters": [filter_of("lang", 9, ["x"])]}, "filters[0].operator"),
        ({"filters": [filter_of('a" or', 1, ["x"])]}, "filters[0].field"),
        ({"filters": [filter_of("", 1, ["x"])]}, "filters[0].field"),
        ({"filters": [filter_of("lang", 1, [])]}, "filters[0].values"),
        ({"filters": [filter_of("lang", 1, ["a", "b"])]}, "filters[0].values"),
        ({"filters": [filter_of("lang", 3, ["a"] * 101)]}, "filters[0].values"),
        ({"filters": [filter_of("lang", 1, ["x" * 1025])]}, "filters[0].values"),
        ({"filters": [filter_of("lang", 1, ["x"])] * 17}, "filters"),
    ],
)
async def test_search_out_of_range_is_refused(
    retriever: Retriever, request_fields: dict[str, object], field: str
) -> None:
    good: dict[str, object] = {"collection": "docs", "query": "words"}
    request = pb.SearchRequest(**(good | request_fields))  # type: ignore[arg-type]
    assert await refused_fields(retriever.stub.Search(request)) == {field}


async def test_all_faults_of_a_search_are_reported_at_once(retriever: Retriever) -> None:
    request = pb.SearchRequest(collection="X", query="", top_k=0)
    fields = await refused_fields(retriever.stub.Search(request))
    assert fields == {"collection", "query", "top_k"}


@pytest.mark.parametrize(("tokens", "name", "field"), [
    (31, "docs", "max_passage_tokens"),
    (2049, "docs", "max_passage_tokens"),
    (64, "9docs", "name"),
])  # fmt: skip
async def test_create_out_of_range_is_refused(
    retriever: Retriever, tokens: int, name: str, field: str
) -> None:
    request = pb.CreateCollectionRequest(name=name, max_passage_tokens=tokens)
    assert await refused_fields(retriever.stub.CreateCollection(request)) == {field}


@pytest.mark.parametrize("ids", [[], [""], ["x" * 513], [str(index) for index in range(1001)]])
async def test_delete_out_of_range_is_refused(retriever: Retriever, ids: list[str]) -> None:
    request = pb.DeleteDocumentsRequest(collection="docs", document_ids=ids)
    fields = await refused_fields(retriever.stub.DeleteDocuments(request))
    assert {field.partition("[")[0] for field in fields} == {"document_ids"}


async def send(retriever: Retriever, messages: Sequence[pb.UpsertDocumentsRequest]) -> object:
    return await retriever.stub.UpsertDocuments(iter(messages))


def start(**fields: object) -> pb.UpsertDocumentsRequest:
    described = {"document_id": "a", "uri": "a.txt", "size_bytes": 3, **fields}
    return pb.UpsertDocumentsRequest(start=pb.DocumentStart(**described))  # type: ignore[arg-type]


async def test_upsert_messages_out_of_order_are_refused(retriever: Retriever) -> None:
    await retriever.create()
    opening = pb.UpsertDocumentsRequest(open=pb.OpenUpsert(collection=retriever.collection))
    data = pb.UpsertDocumentsRequest(data=b"abc")
    empty = pb.UpsertDocumentsRequest()
    streams: list[tuple[list[pb.UpsertDocumentsRequest], str]] = [
        ([], "open"),
        ([start()], "open"),
        ([opening, data], "data"),
        ([opening, opening], "message"),
        ([opening, empty], "message"),
        ([opening, start(), start()], "data"),
        ([opening, start()], "data"),
        ([opening, start(), data, data], "data"),
        ([opening, start(size_bytes=2), data], "data"),
        ([opening, start(size_bytes=-1)], "start.size_bytes"),
        ([opening, start(document_id="")], "start.document_id"),
        ([opening, start(document_id="x" * 513)], "start.document_id"),
        ([opening, start(metadata={"Bad Key": "x"})], "start.metadata"),
        ([opening, start(metadata={f"k{i}": "x" for i in range(33)})], "start.metadata"),
        ([opening, start(metadata={"k": "x" * 40_000})], "start.metadata"),
    ]
    for messages, field in streams:
        assert await refused_fields(send(retriever, messages)) == {field}, messages


async def test_document_over_the_limit_is_skipped_and_the_next_one_is_stored(
    retriever: Retriever,
) -> None:
    await retriever.create()
    results = await retriever.upsert({"huge.txt": b"x" * (33 << 20), "small.txt": "fine"})
    assert [(one.reason, one.status) for one in results] == [
        ("TOO_LARGE", pb.DOCUMENT_STATUS_SKIPPED),
        ("", pb.DOCUMENT_STATUS_INDEXED),
    ]


async def test_unknown_collection_is_not_found(retriever: Retriever) -> None:
    stub = retriever.stub
    opening = pb.UpsertDocumentsRequest(open=pb.OpenUpsert(collection="nowhere"))
    calls: list[Awaitable[object]] = [
        stub.Search(pb.SearchRequest(collection="nowhere", query="x")),
        stub.GetCollection(pb.GetCollectionRequest(name="nowhere")),
        stub.DeleteCollection(pb.DeleteCollectionRequest(name="nowhere")),
        stub.DeleteDocuments(pb.DeleteDocumentsRequest(collection="nowhere", document_ids=["a"])),
        send(retriever, [opening]),
    ]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await call
        assert missing.value.code() is grpc.StatusCode.NOT_FOUND
