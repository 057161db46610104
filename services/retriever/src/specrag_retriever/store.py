"""Collections and documents in Milvus.

Promises:

- What a write acknowledged, the next read of any replica sees (consistency Strong).
- A read or a delete reaches one tenant only.
- Replacing a document inserts the new version first and deletes the old one after it: a crash in
  between leaves both, never neither, and writing the document again mends it. Meanwhile searches
  through this process see the old version only, then the new one only. Through other replicas
  both may be seen for a moment, and a document of several batches appears batch by batch.
- Writes run one at a time: Milvus Lite corrupts its log under concurrent ones. A write that was
  begun is finished even if its caller leaves.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from specrag_common.runtime import deadlines
from specrag_common.runtime.errors import AlreadyExists, NotFound
from specrag_common.runtime.logs import get_logger

from specrag_retriever.catalogue import MILVUS_PREFIX, CollectionInfo, decode_info, milvus_name
from specrag_retriever.expressions import (
    all_of,
    condition_expression,
    none_of,
    one_of,
    quote,
    tenant_is,
)
from specrag_retriever.fusion import WindowHit, fuse
from specrag_retriever.milvus_calls import (
    READ_TIMEOUT_S,
    WRITE_TIMEOUT_S,
    CollectionNotLoadedError,
    guarded,
)
from specrag_retriever.milvus_schema import DENSE_FIELD, LEXICAL_FIELD, PASSAGE_FIELDS
from specrag_retriever.rows import IndexedDocument, batches, build_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from specrag_retriever.expressions import Condition
    from specrag_retriever.milvus_connection import MilvusConnection

STRONG: Final = "Strong"
MAX_HITS: Final = 4096
_MIN_EF: Final = 64
_BM25_PARAMS: Final = {"metric_type": "BM25"}
_IDS_AN_EXPRESSION: Final = 100
_MAX_QUERY_ROWS: Final = 16_384
_MAX_WRITE_WAIT_S: Final = 600.0

_T = TypeVar("_T")
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVersion:
    """A complete version of a document that is stored."""

    document_id: str
    version: str
    num_passages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowQuery:
    """What to search for.

    Attributes:
        tenant: whose documents.
        vector: [dim] float32 of the query.
        words: for the keyword index; empty leaves it out.
        conditions: on documents, all must hold.
        limit: most windows, at most MAX_HITS.
        with_vectors: also return the windows' vectors.
    """

    tenant: str
    vector: NDArray[np.float32]
    words: str
    conditions: Sequence[Condition]
    limit: int
    with_vectors: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHits:
    """Windows, best first, and whether a larger limit could find no more."""

    hits: list[WindowHit]
    is_all: bool


class MilvusStore:
    """See the module; one a process."""

    def __init__(self, connection: MilvusConnection) -> None:
        """Use ``connection``, which the caller closes."""
        self._connection = connection
        self._writing = asyncio.Lock()
        self._hidden: defaultdict[str, set[str]] = defaultdict(set)

    async def create_collection(self, info: CollectionInfo) -> None:
        """Create a collection.

        Raises:
            AlreadyExists: there is one of that name.
        """

        async def create() -> None:
            if await guarded(
                self._connection.client.has_collection(info.milvus_name), "create collection"
            ):
                raise AlreadyExists(f"collection {info.name!r} exists already")
            await self._connection.create_collection(info)

        await self._write(create())

    async def describe_collection(self, name: str) -> CollectionInfo:
        """Return the facts of a collection.

        Raises:
            NotFound: there is none, or another program made it.
        """
        what = f"collection {name!r}"
        call = self._connection.client.describe_collection(milvus_name(name))
        info = decode_info(name, await guarded(call, what))
        if info is None:
            raise NotFound(f"{what}: no such collection", reason="COLLECTION_NOT_FOUND")
        return info

    async def list_collections(self) -> list[CollectionInfo]:
        """Return the facts of all collections, by name."""
        names = await guarded(self._connection.client.list_collections(), "list collections")
        found = []
        for name in sorted(names):
            if not name.startswith(MILVUS_PREFIX):
                continue
            try:
                found.append(await self.describe_collection(name.removeprefix(MILVUS_PREFIX)))
            except NotFound:
                continue  # dropped since, or another program's
        return found

    async def delete_collection(self, name: str) -> None:
        """Delete a collection with everything in it; NotFound if there is none."""
        await self.describe_collection(name)
        client = self._connection.client
        call = client.drop_collection(milvus_name(name))
        await self._write(guarded(call, f"delete collection {name!r}", WRITE_TIMEOUT_S))

    async def count(self, name: str, tenant: str) -> tuple[int, int]:
        """Return how many documents and how many passages a tenant has."""
        num_documents = await self._count(name, [tenant_is(tenant), "row_idx == 0"])
        return num_documents, await self._count(name, [tenant_is(tenant), "window_idx == 0"])

    async def find_versions(
        self, name: str, tenant: str, document_ids: Sequence[str]
    ) -> list[StoredVersion]:
        """Return the complete versions stored of some documents."""
        found: list[StoredVersion] = []
        for ids in _groups(document_ids):
            parts = [tenant_is(tenant), one_of("document_id", ids), "row_idx == 0"]
            rows = await self._query(
                name, parts, ["document_id", "version", "num_passages"], limit=_MAX_QUERY_ROWS
            )
            found += [
                StoredVersion(
                    document_id=row["document_id"],
                    version=row["version"],
                    num_passages=row["num_passages"],
                )
                for row in rows
            ]
        return found

    async def replace_document(self, info: CollectionInfo, document: IndexedDocument) -> None:
        """Store a document in place of its former versions; visible when this returns."""
        await self._write(self._replace(info, document))

    async def delete_documents(
        self, name: str, tenant: str, document_ids: Sequence[str]
    ) -> list[StoredVersion]:
        """Delete documents with everything of them; returns those that were there."""

        async def delete() -> list[StoredVersion]:
            found = await self.find_versions(name, tenant, document_ids)
            for ids in _groups(document_ids):
                await self._delete(name, [tenant_is(tenant), one_of("document_id", ids)])
            return found

        return await self._write(delete())

    async def flush(self, name: str) -> None:
        """Make what was written fast to search, where the server needs to be told."""
        if (await self._connection.abilities()).flush_is_cheap:
            call = self._connection.client.flush(milvus_name(name))
            await self._write(guarded(call, "flush", WRITE_TIMEOUT_S))

    async def search(self, info: CollectionInfo, query: WindowQuery) -> SearchHits:
        """Return windows, best first; vectors and words are looked up at once, then fused."""
        dense = self._ranked(info, query, DENSE_FIELD, query.vector)
        if not (info.has_lexical and query.words):
            hits = await dense
            return SearchHits(hits=hits, is_all=len(hits) < query.limit)
        lexical = self._ranked(info, query, LEXICAL_FIELD, query.words)
        near, worded = await asyncio.gather(dense, lexical)
        is_all = max(len(near), len(worded)) < query.limit
        return SearchHits(hits=fuse(near, worded), is_all=is_all)

    async def _ranked(
        self, info: CollectionInfo, query: WindowQuery, field: str, data: Any
    ) -> list[WindowHit]:
        """Return the windows one index finds, best first.

        BM25 scores are positive on most servers and negative on Milvus Lite; the best one is the
        one furthest from 0 on all.
        """
        is_dense = field == DENSE_FIELD
        ef = max(_MIN_EF, query.limit)
        params = {"metric_type": "COSINE", "params": {"ef": ef}} if is_dense else _BM25_PARAMS
        results: list[list[Any]] = await self._on_loaded(
            info.name,
            lambda: self._connection.client.search(
                info.milvus_name,
                data=[data],
                anns_field=field,
                search_params=params,
                filter=self._search_expression(info.name, query),
                limit=query.limit,
                output_fields=[*PASSAGE_FIELDS, *([DENSE_FIELD] if query.with_vectors else [])],
                consistency_level=STRONG,
            ),
        )
        return [
            WindowHit(
                # Not the primary key: some servers do not say which field it is.
                row_id=f"{hit['chunk_id']}/{hit['window_idx']}",
                score=hit["distance"] if is_dense else abs(hit["distance"]),
                fields=dict(hit["entity"]),
            )
            for hit in results[0]
        ]

    def _search_expression(self, name: str, query: WindowQuery) -> str:
        parts = [tenant_is(query.tenant), *map(condition_expression, query.conditions)]
        if hidden := self._hidden.get(name):
            parts.append(none_of("version", sorted(hidden)))
        return all_of(parts)

    async def _replace(self, info: CollectionInfo, document: IndexedDocument) -> None:
        identity = document.identity
        version = identity.version
        hidden = self._hidden[info.name]
        of_document = [tenant_is(identity.tenant), one_of("document_id", [identity.document_id])]
        stored = await self._versions_of(info.name, of_document)
        old = stored - {version}
        hidden.add(version)  # a failed insert leaves it hidden: half a document is never shown
        if version in stored:  # what an interrupted attempt left
            await self._delete(info.name, [*of_document, f"version == {quote(version)}"])
        for batch in batches(build_rows(document, has_lexical=info.has_lexical)):
            # Not Milvus's own upsert: 2.3 files its rows under the wrong partition key.
            call = self._connection.client.insert(info.milvus_name, batch)
            await guarded(call, "insert passages", WRITE_TIMEOUT_S)
        hidden.discard(version)
        hidden.update(old)
        if old:
            await self._delete(info.name, [*of_document, f"version != {quote(version)}"])
        hidden.difference_update(old)

    async def _versions_of(self, name: str, of_document: list[str]) -> set[str]:
        """Return all versions with any row, incomplete ones too."""
        rows = await self._query(name, of_document, ["version"], limit=_MAX_QUERY_ROWS)
        return {row["version"] for row in rows}

    async def _delete(self, name: str, parts: Sequence[str]) -> None:
        client, expression = self._connection.client, all_of(parts)
        await self._on_loaded(
            name, lambda: client.delete(milvus_name(name), filter=expression), WRITE_TIMEOUT_S
        )

    async def _count(self, name: str, parts: Sequence[str]) -> int:
        rows = await self._query(name, parts, ["count(*)"])
        return int(rows[0]["count(*)"])

    async def _query(
        self, name: str, parts: Sequence[str], fields: list[str], **more: Any
    ) -> Sequence[dict[str, Any]]:
        rows: Sequence[dict[str, Any]] = await self._on_loaded(
            name,
            lambda: self._connection.client.query(
                milvus_name(name),
                filter=all_of(parts),
                output_fields=fields,
                consistency_level=STRONG,
                **more,
            ),
        )
        return rows

    async def _on_loaded(
        self, name: str, make_call: Callable[[], Awaitable[_T]], limit_s: float = READ_TIMEOUT_S
    ) -> _T:
        """Await a call; a collection that is not loaded, as after a restart, is loaded first."""
        what = f"collection {name!r}"
        try:
            return await guarded(make_call(), what, limit_s)
        except CollectionNotLoadedError:
            await self._connection.load_collection(milvus_name(name))
            return await guarded(make_call(), what, limit_s)

    async def close(self) -> None:
        """Wait for the write at hand."""
        async with self._writing:
            return

    async def _write(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a write alone, to its end even if the caller leaves; only the wait is cancellable."""

        async def alone() -> _T:
            deadlines.set_remaining(None)
            async with self._writing:
                return await work

        task = asyncio.create_task(alone(), context=contextvars.copy_context())
        task.add_done_callback(_consume_outcome)
        return await guarded(asyncio.shield(task), "write", _MAX_WRITE_WAIT_S)


def _consume_outcome(task: asyncio.Task[Any]) -> None:
    """Log the error of a write whose caller may have left."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.info("write failed", error=str(error))


def _groups(document_ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for at in range(0, len(document_ids), _IDS_AN_EXPRESSION):
        yield document_ids[at : at + _IDS_AN_EXPRESSION]
