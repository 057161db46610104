"""Facts in collections, abilities by version, and errors in our terms."""

from __future__ import annotations

import asyncio
import time

import pytest
from pymilvus.exceptions import MilvusException
from specrag_common.runtime import deadlines
from specrag_common.runtime.errors import (
    Capacity,
    DeadlineExceeded,
    InternalError,
    NotFound,
    SpecragError,
    UpstreamUnavailable,
)
from specrag_retriever.catalogue import CollectionInfo, decode_info, encode_info
from specrag_retriever.milvus_calls import CollectionNotLoadedError, guarded, translate
from specrag_retriever.milvus_connection import MilvusConnection, abilities_of

INFO = CollectionInfo(
    name="docs", embedder_fingerprint="f", embedding_dim=4, max_passage_tokens=99, has_lexical=True
)


@pytest.mark.parametrize("keep", ["description", "properties"])
def test_facts_are_read_back_from_either_place(keep: str) -> None:
    description, properties = encode_info(INFO)
    described = {"description": description, "properties": properties}
    assert decode_info("docs", {keep: described[keep]}) == INFO


@pytest.mark.parametrize(
    "described", [{}, {"description": "mine"}, {"description": "{}"}, {"description": "[1]"}]
)
def test_collections_of_others_have_no_facts(described: dict[str, object]) -> None:
    assert decode_info("docs", described) is None


@pytest.mark.parametrize(
    ("version", "has_lexical", "flush_is_cheap"),
    [
        ("v2.3.5", False, False),
        ("v2.3.5-lite", False, False),
        ("v2.4.1", False, False),
        ("2.5.0", True, False),
        ("v2.6.3-dev", True, False),
        ("v3.0.0", True, False),
        ("milvus_lite-3.2.2", True, True),
    ],
)
def test_abilities_follow_the_version(
    version: str, has_lexical: bool, flush_is_cheap: bool
) -> None:
    abilities = abilities_of(version)
    assert (abilities.has_lexical, abilities.flush_is_cheap) == (has_lexical, flush_is_cheap)


@pytest.mark.parametrize(
    ("code", "message", "expected"),
    [
        (100, "collection not found", NotFound),
        (101, "collection not loaded", CollectionNotLoadedError),
        (8, "rate limit exceeded", Capacity),
        (2, "Fail connecting to server", UpstreamUnavailable),
        (1, "StatusCode.UNAVAILABLE", UpstreamUnavailable),
        (1, "retry timeout: 5s", UpstreamUnavailable),
        (1100, "invalid parameter: secret text", InternalError),
    ],
)
def test_milvus_errors_are_translated(code: int, message: str, expected: type[Exception]) -> None:
    error = translate(MilvusException(code, message), "search 'docs'")
    assert type(error) is expected
    assert "secret" not in str(error)


async def test_own_limit_is_unavailable_and_the_callers_is_deadline_exceeded() -> None:
    with pytest.raises(UpstreamUnavailable, match=r"no answer in 0\.05 s"):
        await guarded(asyncio.sleep(5), "search", 0.05)
    deadlines.set_remaining(0.05)
    try:
        with pytest.raises(DeadlineExceeded):
            await guarded(asyncio.sleep(5), "search", 5)
    finally:
        deadlines.set_remaining(None)


def test_connection_is_made_without_an_event_loop() -> None:
    MilvusConnection("http://127.0.0.1:1")


def test_a_second_event_loop_gets_a_working_connection() -> None:
    async def once() -> None:
        connection = MilvusConnection("http://127.0.0.1:1")
        began = time.monotonic()
        with pytest.raises(SpecragError, match="cannot be reached"):
            await connection.probe()
        assert time.monotonic() - began < 3
        await connection.close()

    asyncio.run(once())
    asyncio.run(once())
