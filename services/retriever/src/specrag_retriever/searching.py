"""From a question to passages: embed, search windows, keep each passage once."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specrag_common.runtime.errors import FailedPrecondition
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span

from specrag_retriever.duplicates import DuplicateFilter
from specrag_retriever.embedder import Urgency
from specrag_retriever.lexical import lexical_query
from specrag_retriever.store import MAX_HITS, WindowQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specrag_retriever.catalogue import CollectionInfo
    from specrag_retriever.embedder import Embedder
    from specrag_retriever.expressions import Condition
    from specrag_retriever.fusion import WindowHit
    from specrag_retriever.store import MilvusStore

_WINDOWS_A_PASSAGE: Final = 4
_MIN_WINDOWS: Final = 32
_GROWTH: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageQuery:
    """A validated search.

    Attributes:
        collection: its name.
        tenant: whose documents.
        query: question or keywords.
        top_k: most passages.
        conditions: on documents, all must hold.
        include_embeddings: also return the vector of each passage's best window.
    """

    collection: str
    tenant: str
    query: str
    top_k: int
    conditions: Sequence[Condition] = ()
    include_embeddings: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPassage:
    """A passage that was found.

    Attributes:
        score: fused score of its best window.
        fields: stored fields, named as in ``milvus_schema.PASSAGE_FIELDS``.
    """

    score: float
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Passages, best first, and where the time went."""

    passages: list[FoundPassage]
    embed_s: float
    search_s: float


class PassageSearcher:
    """Answers searches; safe to share between requests."""

    def __init__(self, store: MilvusStore, embedder: Embedder) -> None:
        """Search ``store`` with vectors from ``embedder``."""
        self._store = store
        self._embedder = embedder

    async def search(self, query: PassageQuery) -> SearchOutcome:
        """Return the passages nearest to the query.

        Raises:
            NotFound: there is no such collection.
            FailedPrecondition: its vectors come from another embedder.
        """
        began = time.perf_counter()
        embedding = asyncio.ensure_future(self._embedder.embed([query.query], Urgency.QUERY))
        try:
            info = await self._store.describe_collection(query.collection)
            require_embedder(info, self._embedder)
            vectors = await embedding
        finally:
            embedding.cancel()
        embedded = time.perf_counter()
        with span(SpanName.SEARCH_INDEX, {SpanKey.COLLECTION.value: query.collection}) as step:
            found = await self._search_until_enough(info, query, vectors[0])
            step.set_attribute(SpanKey.NUM_PASSAGES, len(found))
        done = time.perf_counter()
        return SearchOutcome(passages=found, embed_s=embedded - began, search_s=done - embedded)

    async def _search_until_enough(
        self, info: CollectionInfo, query: PassageQuery, vector: Any
    ) -> list[FoundPassage]:
        """Ask for more windows until enough different passages are there, or no more exist."""
        words = lexical_query(query.query)
        limit = max(_MIN_WINDOWS, query.top_k * _WINDOWS_A_PASSAGE)
        while True:
            found = await self._store.search(
                info,
                WindowQuery(
                    tenant=query.tenant,
                    vector=vector,
                    words=words,
                    conditions=query.conditions,
                    limit=limit,
                    with_vectors=query.include_embeddings,
                ),
            )
            passages = collapse(found.hits, query.top_k)
            if len(passages) >= query.top_k or found.is_all or limit >= MAX_HITS:
                return passages
            limit = min(MAX_HITS, limit * _GROWTH)


def collapse(hits: Iterable[WindowHit], top_k: int) -> list[FoundPassage]:
    """Return the first ``top_k`` different passages of hits that come best first."""
    seen: set[str] = set()
    duplicates = DuplicateFilter()
    passages: list[FoundPassage] = []
    for hit in hits:
        chunk_id = hit.fields["chunk_id"]
        if chunk_id in seen:
            continue
        seen.add(chunk_id)
        if duplicates.keep(hit.fields["text"]):
            passages.append(FoundPassage(score=hit.score, fields=hit.fields))
            if len(passages) == top_k:
                break
    return passages


def require_embedder(info: CollectionInfo, embedder: Embedder) -> None:
    """Raise FailedPrecondition when a collection's vectors come from another embedder."""
    if info.embedder_fingerprint != embedder.fingerprint:
        raise FailedPrecondition(
            f"collection {info.name!r} was embedded with {info.embedder_fingerprint}, this "
            f"service embeds with {embedder.fingerprint}; create another collection and ingest "
            "again, or start the service with the former embedder",
            reason="EMBEDDER_MISMATCH",
        )
