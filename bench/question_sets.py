"""Question sets in the evaluation schema: a question with its documents, one a JSON line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag.v1 import common_pb2

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedQuestion:
    """A question to be answered from its own documents."""

    question_id: str
    question: str
    passages: tuple[common_pb2.Passage, ...]


def load_questions(
    path: Path, *, limit: int, max_passages: int, max_passage_chars: int
) -> list[ClosedQuestion]:
    """Read the first ``limit`` questions; documents are cut to ``max_passage_chars``.

    Args:
        path: a file of lines ``{"id", "question", "documents": [{"id", "title", "text"}]}``.
        limit: most questions.
        max_passages: most documents a question.
        max_passage_chars: code points kept of each document.
    """
    lines = path.read_text(encoding="utf-8").splitlines()[:limit]
    return [_to_question(json.loads(line), max_passages, max_passage_chars) for line in lines]


def _to_question(
    record: dict[str, object], max_passages: int, max_passage_chars: int
) -> ClosedQuestion:
    documents = record["documents"]
    assert isinstance(documents, list)
    return ClosedQuestion(
        question_id=str(record["id"]),
        question=str(record["question"]),
        passages=tuple(
            _to_passage(document, max_passage_chars) for document in documents[:max_passages]
        ),
    )


def _to_passage(document: dict[str, str], max_passage_chars: int) -> common_pb2.Passage:
    text = document["text"][:max_passage_chars]
    return common_pb2.Passage(
        chunk_id=document["id"],
        document_id=document["id"],
        title=document["title"],
        text=text,
        start_char=0,
        end_char=len(text),
    )
