"""The service through its gRPC surface, against Milvus Lite."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
from specrag.v1 import retriever_pb2 as pb
from specrag_retriever.documents import extract_document

if TYPE_CHECKING:
    from tests.retriever.serving import LiteServer, Retriever, StartRetriever

pytestmark = pytest.mark.integration

INDEXED = pb.DOCUMENT_STATUS_INDEXED
UNCHANGED = pb.DOCUMENT_STATUS_UNCHANGED
SKIPPED = pb.DOCUMENT_STATUS_SKIPPED


async def test_search_finds_a_document_right_after_it_was_written(retriever: Retriever) -> None:
    await retriever.create()
    for index in range(5):
        await retriever.upsert({f"d{index}": f"the marker of this one is zebra{index}"})
        assert (await retriever.found_ids(f"zebra{index}"))[0] == f"d{index}"


async def test_deleted_document_is_not_found_and_is_counted(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"a": "alpha badger", "b": "beta badger", "c": "gamma badger"})
    request = pb.DeleteDocumentsRequest(
        collection=retriever.collection, document_ids=["a", "c", "missing", "a"]
    )
    response = await retriever.stub.DeleteDocuments(request)
    assert (response.num_deleted_documents, response.num_deleted_passages) == (2, 2)
    assert await retriever.found_ids("badger") == ["b"]
    assert await retriever.counts() == (1, 1)


async def test_tenants_see_and_delete_their_own_documents_only(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"same": "red secret otter"}, tenant="one")
    await retriever.upsert({"same": "blue secret otter"}, tenant="two")
    one = await retriever.search("secret otter", tenant="one", top_k=100)
    assert [passage.text for passage in one.passages] == ["red secret otter"]
    assert await retriever.found_ids("secret otter") == []
    await retriever.stub.DeleteDocuments(
        pb.DeleteDocumentsRequest(
            collection=retriever.collection, tenant="one", document_ids=["same"]
        )
    )
    assert await retriever.counts("one") == (0, 0)
    assert await retriever.found_ids("secret otter", tenant="two") == ["same"]


async def test_upsert_says_unchanged_for_the_same_content(retriever: Retriever) -> None:
    await retriever.create()
    first = await retriever.upsert({"a": "one two three"}, metadata={"lang": "en"})
    again = await retriever.upsert({"a": "one two three"}, metadata={"lang": "en"})
    other = await retriever.upsert({"a": "one two three"}, metadata={"lang": "de"})
    assert [first[0].status, again[0].status, other[0].status] == [INDEXED, UNCHANGED, INDEXED]
    assert again[0].num_passages == 1
    assert await retriever.counts() == (1, 1)


async def test_upsert_replaces_every_passage_of_the_former_version(retriever: Retriever) -> None:
    await retriever.create(max_passage_tokens=32)
    long = "\n\n".join(f"old paragraph number {index} about walrus tusks" * 3 for index in range(9))
    assert (await retriever.upsert({"a": long}))[0].num_passages > 5
    await retriever.upsert({"a": "short and new about walrus tusks"})
    response = await retriever.search("walrus tusks", top_k=50)
    assert [one.text for one in response.passages] == ["short and new about walrus tusks"]
    assert await retriever.counts() == (1, 1)


async def test_chunk_ids_stay_while_the_content_stays(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"a": "stable words", "b": "other words"})
    before = {one.chunk_id for one in (await retriever.search("words")).passages}
    await retriever.stub.DeleteDocuments(
        pb.DeleteDocumentsRequest(collection=retriever.collection, document_ids=["a"])
    )
    await retriever.upsert({"a": "stable words"})
    assert {one.chunk_id for one in (await retriever.search("words")).passages} == before


@pytest.mark.parametrize(
    "text",
    [
        "سياسة الإجازات\n\nيحق لكل موظف \u202b21 يومًا\u202c من الإجازة. HR-2041\n\nמדיניות חופשה",
        "退款政策：客户自签收之日起三十天内可以申请全额退款。" * 12
        + "\n\n返品ポリシー：30日以内。환불 정책",
        "# 🚀 Launch 👩🏽\u200d💻👨\u200d👩\u200d👧\u200d👦\n\n"
        + "The 🍕 team ships 🇨🇭🇯🇵 on time. ❤️\u200d🔥 " * 30,
    ],
    ids=["rtl", "cjk", "emoji"],
)
async def test_offsets_count_code_points_of_the_extracted_text(
    retriever: Retriever, text: str
) -> None:
    await retriever.create(max_passage_tokens=32)
    await retriever.upsert({"a.md": text})
    extracted = extract_document(text.encode(), "a.md").text
    passages = (await retriever.search(text[:40], top_k=50)).passages
    assert passages
    for passage in passages:
        assert extracted[passage.start_char : passage.end_char] == passage.text


async def test_every_vector_is_found_after_a_flush_and_a_wait(retriever: Retriever) -> None:
    await retriever.create()
    documents = {f"d{index}": f"unique{index} common filler words" for index in range(60)}
    await retriever.upsert(dict(documents.items()))
    await asyncio.sleep(1)
    for document_id, text in documents.items():
        assert (await retriever.found_ids(text, top_k=1)) == [document_id]


async def test_embeddings_come_when_asked_for(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"a": "vector please"})
    passage = (await retriever.search("vector", include_embeddings=True)).passages[0]
    vector = np.frombuffer(passage.embedding.data, dtype="<f4")
    assert list(passage.embedding.shape) == [64]
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-5)
    without = (await retriever.search("vector")).passages[0]
    assert not without.HasField("embedding")


async def test_copies_of_one_text_do_not_flood_the_result(retriever: Retriever) -> None:
    await retriever.create()
    copies: dict[str, str | bytes] = {f"copy{index}": "Lyon opens at 08:00." for index in range(12)}
    await retriever.upsert({**copies, "other": "Paris opens at 09:00 or later in winter."})
    found = await retriever.found_ids("when does Lyon open", top_k=8)
    assert len(found) == 2
    assert "other" in found


async def test_skipped_documents_are_named_and_do_not_stop_others(retriever: Retriever) -> None:
    await retriever.create()
    results = await retriever.upsert(
        {
            "empty.txt": "",
            "blank.md": " \n\t\ufeff",
            "binary.md": bytes(range(256)) * 8,
            "office.docx": b"PK\x03\x04" + bytes(200),
            "broken.pdf": b"%PDF-1.7\ngarbage",
            "damaged.txt": b"good text \xff\xfe end",
            "good.txt": "all is well",
        }
    )
    assert [(one.document_id, one.status, one.reason) for one in results] == [
        ("empty.txt", SKIPPED, "EMPTY"),
        ("blank.md", SKIPPED, "EMPTY"),
        ("binary.md", SKIPPED, "BINARY"),
        ("office.docx", SKIPPED, "UNSUPPORTED"),
        ("broken.pdf", SKIPPED, "BROKEN"),
        ("damaged.txt", INDEXED, ""),
        ("good.txt", INDEXED, ""),
    ]
    assert all(one.detail for one in results[:6])
    assert await retriever.counts() == (2, 2)


async def test_skipped_replacement_keeps_the_former_version(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"a.txt": "the former version"})
    await retriever.upsert({"a.txt": ""})
    assert await retriever.found_ids("former version") == ["a.txt"]


async def test_collections_are_listed_described_and_deleted(retriever: Retriever) -> None:
    created = await retriever.create(max_passage_tokens=100)
    assert (created.embedder_fingerprint, created.embedding_dim) == ("words-1", 64)
    await retriever.upsert({"a": "text of the collection"})
    listed = await retriever.stub.ListCollections(pb.ListCollectionsRequest())
    ours = [one for one in listed.collections if one.name == retriever.collection]
    assert [(one.max_passage_tokens, one.num_documents) for one in ours] == [(100, 1)]
    name = pb.DeleteCollectionRequest(name=retriever.collection)
    await retriever.stub.DeleteCollection(name)
    with pytest.raises(grpc.aio.AioRpcError) as gone:
        await retriever.search("text")
    assert gone.value.code() is grpc.StatusCode.NOT_FOUND


async def test_creating_a_collection_twice_is_already_exists(retriever: Retriever) -> None:
    await retriever.create()
    with pytest.raises(grpc.aio.AioRpcError) as twice:
        await retriever.create()
    assert twice.value.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_another_embedder_is_refused_for_search_and_upsert(
    retriever: Retriever, lite: LiteServer, start_retriever: StartRetriever
) -> None:
    await retriever.create()
    other = await start_retriever(lite.uri, fingerprint="words-2")
    other.collection = retriever.collection
    for call in (other.search("x"), other.upsert({"a": "x"})):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "words-2" in (refused.value.details() or "")


async def test_searches_during_replacements_see_exactly_one_version(retriever: Retriever) -> None:
    await retriever.create(max_passage_tokens=32)

    def version(number: int) -> str:
        body = "walrus tusks are long and this sentence fills the passage up"
        return "\n\n".join(f"v{number} part {part} {body}" for part in range(4))

    await retriever.upsert({"a": version(0)})

    async def replace() -> None:
        for number in range(1, 8):
            await retriever.upsert({"a": version(number)})

    replacing = asyncio.create_task(replace())
    seen: list[set[str]] = []
    while not replacing.done():
        response = await retriever.search("walrus tusks", top_k=50)
        seen.append({passage.text.split()[0] for passage in response.passages})
    await replacing
    assert all(len(versions) == 1 for versions in seen), seen
    assert len(set().union(*seen)) > 2, "the searches did not overlap the replacements"


async def test_two_replicas_see_each_others_writes(
    retriever: Retriever, lite: LiteServer, start_retriever: StartRetriever
) -> None:
    await retriever.create()
    other = await start_retriever(lite.uri)
    other.collection = retriever.collection
    await retriever.upsert({"a": "written through the first"})
    assert await other.found_ids("written") == ["a"]
    await other.upsert({"a": "replaced through the second"})
    assert [one.text for one in (await retriever.search("replaced")).passages] == [
        "replaced through the second"
    ]


async def test_concurrent_upserts_of_many_documents_lose_nothing(retriever: Retriever) -> None:
    await retriever.create()

    async def write(part: int) -> None:
        await retriever.upsert({f"p{part}-{index}": f"w{part}x{index} text" for index in range(20)})

    await asyncio.gather(*(write(part) for part in range(4)))
    assert await retriever.counts() == (80, 80)


async def test_fifth_open_upsert_stream_is_resource_exhausted(retriever: Retriever) -> None:
    await retriever.create()
    calls = [retriever.stub.UpsertDocuments() for _ in range(4)]
    opening = pb.UpsertDocumentsRequest(open=pb.OpenUpsert(collection=retriever.collection))
    for call in calls:
        await call.write(opening)
    await asyncio.sleep(0.2)
    with pytest.raises(grpc.aio.AioRpcError) as full:
        await retriever.upsert({"a": "x"})
    assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for call in calls:
        await call.done_writing()
        await call
    assert (await retriever.upsert({"a": "x"}))[0].status == INDEXED


async def test_leaving_in_the_middle_of_a_stream_keeps_what_was_stored(
    retriever: Retriever,
) -> None:
    await retriever.create()
    call = retriever.stub.UpsertDocuments()
    await call.write(pb.UpsertDocumentsRequest(open=pb.OpenUpsert(collection=retriever.collection)))
    for index in range(3):
        start = pb.DocumentStart(document_id=f"d{index}", uri="d.txt", size_bytes=5)
        await call.write(pb.UpsertDocumentsRequest(start=start))
        await call.write(pb.UpsertDocumentsRequest(data=b"kept!"))
    for _ in range(100):
        if (await retriever.counts())[0] == 3:
            break
        await asyncio.sleep(0.05)
    call.cancel()
    assert await retriever.counts() == (3, 3)
    results = await retriever.upsert({"d3": "another"})
    assert results[0].status == INDEXED
