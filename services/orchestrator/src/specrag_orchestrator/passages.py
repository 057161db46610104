"""A passage as the orchestrator handles it: found, numbered, read, cited."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.conversation import PromptPassage

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePassage:
    """A piece of a document.

    Attributes:
        chunk_id: identifies the passage within its collection; empty for unnamed given passages.
        document_id: its document.
        title: title of the document.
        uri: where the document came from; may be empty.
        text: the passage as it stands in the document's extracted text.
        start_char: offset of ``text`` in that text, in code points.
        end_char: end of ``text`` there (exclusive).
        score: retrieval score; higher is better within one result list.
        number: citation number, >= 1; 0 before one is assigned.
        collection: where it was found; empty for given passages.
        metadata: metadata of the document.
    """

    chunk_id: str
    document_id: str = ""
    title: str = ""
    uri: str = ""
    text: str
    start_char: int = 0
    end_char: int = 0
    score: float = 0.0
    number: int = 0
    collection: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """What makes two passages of a session the same one: place and content."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return f"{self.collection}\x1f{self.chunk_id}\x1f{digest}"

    def to_prompt(self) -> PromptPassage:
        """Return the passage as a model reads it."""
        return PromptPassage(number=self.number, title=self.title, text=self.text)
