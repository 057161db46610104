"""What is known of a collection, and how it is written into Milvus.

The facts live in the collection itself, so that every replica sees the same: as properties, and
in the description for servers that drop unknown properties.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

MILVUS_PREFIX: Final = "specrag_"
"""Names in Milvus begin with it: other collections of a shared server are never touched."""

NAME_PATTERN: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
"""Names a collection may have."""

MIN_PASSAGE_TOKENS: Final = 32
"""Shortest limit a collection may set for its passages."""

MAX_PASSAGE_TOKENS: Final = 2048
"""Longest limit a collection may set for its passages."""

_PROPERTY: Final = "specrag.collection"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionInfo:
    """A collection as created.

    Attributes:
        name: without the prefix used in Milvus.
        embedder_fingerprint: the space its vectors are in.
        embedding_dim: their length.
        max_passage_tokens: longest passage.
        has_lexical: whether it holds a keyword index too.
    """

    name: str
    embedder_fingerprint: str
    embedding_dim: int
    max_passage_tokens: int
    has_lexical: bool

    @property
    def milvus_name(self) -> str:
        """Return its name in Milvus."""
        return MILVUS_PREFIX + self.name


def milvus_name(name: str) -> str:
    """Return the name in Milvus of a collection."""
    return MILVUS_PREFIX + name


def encode_info(info: CollectionInfo) -> tuple[str, dict[str, str]]:
    """Return the description and the properties to create the collection with."""
    facts = {
        "format": _FORMAT,
        "embedder": info.embedder_fingerprint,
        "dim": info.embedding_dim,
        "max_passage_tokens": info.max_passage_tokens,
        "lexical": info.has_lexical,
    }
    text = json.dumps(facts, separators=(",", ":"))
    return text, {_PROPERTY: text}


def decode_info(name: str, described: Mapping[str, Any]) -> CollectionInfo | None:
    """Return the facts of a described collection; ``None`` when this service did not make it."""
    text = (described.get("properties") or {}).get(_PROPERTY) or described.get("description")
    try:
        facts = json.loads(text or "")
        return CollectionInfo(
            name=name,
            embedder_fingerprint=str(facts["embedder"]),
            embedding_dim=int(facts["dim"]),
            max_passage_tokens=int(facts["max_passage_tokens"]),
            has_lexical=bool(facts["lexical"]),
        )
    except (ValueError, KeyError, TypeError):
        return None
