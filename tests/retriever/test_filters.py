"""Metadata filters, and values that try to be more than values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from specrag.v1 import retriever_pb2 as pb

if TYPE_CHECKING:
    from tests.retriever.serving import Retriever

pytestmark = pytest.mark.integration

EQUALS = pb.FILTER_OPERATOR_EQUALS
NOT_EQUALS = pb.FILTER_OPERATOR_NOT_EQUALS
IN = pb.FILTER_OPERATOR_IN

HOSTILE = [
    '" or true or "',
    '") or (tenant == "other',
    "back\\slash",
    'trailing\\"',
    "line\nbreak\r\n\ttab",
    "it's 'quoted' % _ {x} $meta",
    "naïve 日本 🍕 \u202e",
    "\\u0022 or 1 == 1",
    '"] or tenant in ["other',
]


def condition(
    field: str, operator: pb.FilterOperator.ValueType, *values: str
) -> pb.FilterCondition:
    return pb.FilterCondition(field=field, operator=operator, values=values)


async def test_conditions_select_documents(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"en": "shared words one"}, metadata={"lang": "en", "year": "2024"})
    await retriever.upsert({"de": "shared words two"}, metadata={"lang": "de"})
    await retriever.upsert({"none": "shared words three"})

    async def found(*conditions: pb.FilterCondition) -> set[str]:
        return set(await retriever.found_ids("shared words", filters=conditions))

    assert await found(condition("lang", EQUALS, "en")) == {"en"}
    assert await found(condition("lang", IN, "en", "de", "fr")) == {"en", "de"}
    assert await found(condition("lang", NOT_EQUALS, "en")) == {"de", "none"}
    assert await found(condition("document_id", NOT_EQUALS, "en")) == {"de", "none"}
    assert await found(condition("uri", IN, "none", "de")) == {"none", "de"}
    assert await found(condition("lang", EQUALS, "en"), condition("year", EQUALS, "2023")) == set()


async def test_hostile_values_match_only_themselves(retriever: Retriever) -> None:
    await retriever.create()
    await retriever.upsert({"foreign": "shared words"}, tenant="other")
    await retriever.upsert({"plain": "shared words here"}, metadata={"key": "plain"})
    for index, value in enumerate(HOSTILE):
        await retriever.upsert({f"h{index}": f"shared words {index}"}, metadata={"key": value})
    for index, value in enumerate(HOSTILE):
        for operator in (EQUALS, IN):
            filters = [condition("key", operator, value)]
            assert await retriever.found_ids("shared words", filters=filters) == [f"h{index}"]
        filters = [condition("key", NOT_EQUALS, value)]
        left = await retriever.found_ids("shared words", filters=filters, top_k=50)
        assert f"h{index}" not in left
        assert "foreign" not in left


async def test_hostile_ids_and_tenants_stay_apart(retriever: Retriever) -> None:
    await retriever.create()
    hostile = [value.replace("\n", "").replace("\r", "").replace("\t", "") for value in HOSTILE]
    await retriever.upsert({"victim": "shared words"}, tenant="other")
    for value in hostile:
        await retriever.upsert({value: f"shared words {value}"}, tenant=value)
        assert await retriever.found_ids("shared words", tenant=value) == [value]
        request = pb.DeleteDocumentsRequest(
            collection=retriever.collection, tenant=value, document_ids=[value]
        )
        assert (await retriever.stub.DeleteDocuments(request)).num_deleted_documents == 1
        assert await retriever.counts(value) == (0, 0)
    assert await retriever.found_ids("shared words", tenant="other") == ["victim"]
