"""Requests of the contract to domain values; the one place where outside data is checked.

Every fault of a request is reported at once, each with the field, the value and the limit.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag.v1 import retriever_pb2
from specrag_common.runtime.errors import FieldViolation, InvalidRequest

from specrag_retriever.catalogue import MAX_PASSAGE_TOKENS, MIN_PASSAGE_TOKENS, NAME_PATTERN
from specrag_retriever.expressions import Comparison, Condition, is_field_name
from specrag_retriever.searching import PassageQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

DEFAULT_TENANT: Final = "default"
DEFAULT_TOP_K: Final = 8
MAX_QUERY_CHARS: Final = 8192
MAX_TOP_K: Final = 100
MAX_FILTERS: Final = 16
MAX_VALUES: Final = 100
MAX_VALUE_CHARS: Final = 1024
MAX_TENANT_CHARS: Final = 128
MAX_DOCUMENT_ID_CHARS: Final = 512
MAX_URI_CHARS: Final = 2048
MAX_TITLE_CHARS: Final = 1024
MAX_METADATA_ENTRIES: Final = 32
MAX_METADATA_BYTES: Final = 32 * 1024
MAX_DELETED_IDS: Final = 1000

_METADATA_KEY: Final = re.compile(r"[a-z0-9_]{1,64}")
_COMPARISONS: Final = {
    retriever_pb2.FILTER_OPERATOR_EQUALS: Comparison.EQUALS,
    retriever_pb2.FILTER_OPERATOR_NOT_EQUALS: Comparison.NOT_EQUALS,
    retriever_pb2.FILTER_OPERATOR_IN: Comparison.IN,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UpsertTarget:
    """Where the documents of a stream go."""

    collection: str
    tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentDescription:
    """A document announced on a stream, before its bytes."""

    document_id: str
    uri: str
    title: str
    metadata: Mapping[str, str]
    size_bytes: int


@dataclass(slots=True)
class _Checker:
    """Collects what is wrong with a request."""

    violations: list[FieldViolation] = field(default_factory=list)

    def require(self, name: str, description: str, *, holds: bool) -> None:
        """Note a fault unless the condition holds."""
        if not holds:
            self.violations.append(FieldViolation(name, description))

    def finish(self) -> None:
        """Raise InvalidRequest if anything was noted."""
        if self.violations:
            raise InvalidRequest.of(self.violations)

    def collection(self, name: str, field_name: str = "collection") -> str:
        """Check the name of a collection."""
        is_good = NAME_PATTERN.fullmatch(name) is not None
        self.require(field_name, f"{name[:80]!r} must match [a-z][a-z0-9_]{{0,62}}", holds=is_good)
        return name

    def tenant(self, tenant: str) -> str:
        """Check a tenant; empty means the default one."""
        self.text("tenant", tenant, MAX_TENANT_CHARS, min_chars=0)
        return tenant or DEFAULT_TENANT

    def text(self, name: str, text: str, max_chars: int, *, min_chars: int = 1) -> str:
        """Check the length of a text and that it is one line of characters."""
        length = len(text)
        limits = f"{min_chars} to {max_chars} code points"
        self.require(name, f"length={length}, allowed are {limits}", holds=length <= max_chars)
        self.require(name, f"is empty, allowed are {limits}", holds=length >= min_chars)
        has_controls = any(unicodedata.category(one) == "Cc" for one in text[:max_chars])
        self.require(name, "holds control characters", holds=not has_controls)
        return text

    def document_ids(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Check the ids to delete; repeated ones count once."""
        unique = tuple(dict.fromkeys(ids))
        is_good = 1 <= len(unique) <= MAX_DELETED_IDS
        self.require("document_ids", f"{len(unique)} ids, allowed are 1 to 1000", holds=is_good)
        for index, document_id in enumerate(unique[:MAX_DELETED_IDS]):
            self.text(f"document_ids[{index}]", document_id, MAX_DOCUMENT_ID_CHARS)
        return unique


def decode_search(request: retriever_pb2.SearchRequest) -> PassageQuery:
    """Return the query; InvalidRequest names every fault."""
    check = _Checker()
    collection = check.collection(request.collection)
    tenant = check.tenant(request.tenant)
    length = len(request.query)
    check.require(
        "query", f"length={length}, the limit is {MAX_QUERY_CHARS}", holds=length <= MAX_QUERY_CHARS
    )
    check.require("query", "is blank", holds=bool(request.query.strip()))
    top_k = request.top_k if request.HasField("top_k") else DEFAULT_TOP_K
    check.require("top_k", f"{top_k} is not within 1 to {MAX_TOP_K}", holds=1 <= top_k <= MAX_TOP_K)
    num_filters = len(request.filters)
    check.require(
        "filters", f"{num_filters} conditions, at most 16", holds=num_filters <= MAX_FILTERS
    )
    conditions = [
        _decode_condition(check, f"filters[{index}]", condition)
        for index, condition in enumerate(request.filters[:MAX_FILTERS])
    ]
    check.finish()
    return PassageQuery(
        collection=collection,
        tenant=tenant,
        query=request.query,
        top_k=top_k,
        conditions=tuple(one for one in conditions if one is not None),
        include_embeddings=request.include_embeddings,
    )


def _decode_condition(
    check: _Checker, name: str, condition: retriever_pb2.FilterCondition
) -> Condition | None:
    comparison = _COMPARISONS.get(condition.operator)
    check.require(
        f"{name}.operator", f"{condition.operator} is no operator", holds=comparison is not None
    )
    check.require(
        f"{name}.field",
        f"{condition.field[:80]!r} is neither document_id, title, uri nor a metadata key "
        "([a-z0-9_], at most 64)",
        holds=is_field_name(condition.field),
    )
    most = MAX_VALUES if comparison is Comparison.IN else 1
    num_values = len(condition.values)
    check.require(
        f"{name}.values", f"{num_values} values, allowed are 1 to {most}",
        holds=1 <= num_values <= most,
    )  # fmt: skip
    longest = max(map(len, condition.values), default=0)
    check.require(
        f"{name}.values",
        f"length={longest} of a value, the limit is {MAX_VALUE_CHARS} code points",
        holds=longest <= MAX_VALUE_CHARS,
    )
    if comparison is None:
        return None
    return Condition(field=condition.field, comparison=comparison, values=tuple(condition.values))


def decode_open(message: retriever_pb2.OpenUpsert) -> UpsertTarget:
    """Return where documents go; InvalidRequest names every fault."""
    check = _Checker()
    target = UpsertTarget(
        collection=check.collection(message.collection, "open.collection"),
        tenant=check.tenant(message.tenant),
    )
    check.finish()
    return target


def decode_start(message: retriever_pb2.DocumentStart) -> DocumentDescription:
    """Return what is said of a document; InvalidRequest names every fault."""
    check = _Checker()
    size = message.size_bytes
    check.require("start.size_bytes", f"{size} is negative", holds=size >= 0)
    description = DocumentDescription(
        document_id=check.text("start.document_id", message.document_id, MAX_DOCUMENT_ID_CHARS),
        uri=check.text("start.uri", message.uri, MAX_URI_CHARS, min_chars=0),
        title=check.text("start.title", message.title, MAX_TITLE_CHARS, min_chars=0),
        metadata=_decode_metadata(check, message.metadata),
        size_bytes=size,
    )
    check.finish()
    return description


def _decode_metadata(check: _Checker, metadata: Mapping[str, str]) -> Mapping[str, str]:
    name = "start.metadata"
    num_entries = len(metadata)
    check.require(
        name, f"{num_entries} entries, at most 32", holds=num_entries <= MAX_METADATA_ENTRIES
    )
    for key in metadata:
        is_good = _METADATA_KEY.fullmatch(key) is not None
        check.require(name, f"key {key[:80]!r} must match [a-z0-9_]{{1,64}}", holds=is_good)
    num_bytes = sum(len(key) + len(value.encode()) for key, value in metadata.items())
    check.require(
        name,
        f"size_bytes={num_bytes}, the limit is {MAX_METADATA_BYTES}",
        holds=num_bytes <= MAX_METADATA_BYTES,
    )
    return dict(metadata)


def decode_delete(
    request: retriever_pb2.DeleteDocumentsRequest,
) -> tuple[UpsertTarget, tuple[str, ...]]:
    """Return where to delete, and which ids; InvalidRequest names every fault."""
    check = _Checker()
    target = UpsertTarget(
        collection=check.collection(request.collection), tenant=check.tenant(request.tenant)
    )
    ids = check.document_ids(request.document_ids)
    check.finish()
    return target, ids


def decode_create(
    request: retriever_pb2.CreateCollectionRequest, default_max_passage_tokens: int
) -> tuple[str, int]:
    """Return name and longest passage; InvalidRequest names every fault."""
    check = _Checker()
    name = check.collection(request.name, "name")
    is_given = request.HasField("max_passage_tokens")
    tokens = request.max_passage_tokens if is_given else default_max_passage_tokens
    check.require(
        "max_passage_tokens",
        f"{tokens} is not within {MIN_PASSAGE_TOKENS} to {MAX_PASSAGE_TOKENS}",
        holds=MIN_PASSAGE_TOKENS <= tokens <= MAX_PASSAGE_TOKENS,
    )
    check.finish()
    return name, tokens


def decode_name(name: str) -> str:
    """Return the name of a collection; InvalidRequest if it cannot be one."""
    check = _Checker()
    check.collection(name, "name")
    check.finish()
    return name


def decode_tenant(tenant: str) -> str:
    """Return the tenant, the default one for empty; InvalidRequest if it cannot be one."""
    check = _Checker()
    decoded = check.tenant(tenant)
    check.finish()
    return decoded
