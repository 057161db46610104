"""Question sets in the evaluation schema: a question with its documents, one a JSON line."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from specrag.v1 import common_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedQuestion:
    """A question to be answered from its own documents."""

    question_id: str
    question: str
    passages: tuple[common_pb2.Passage, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTo:
    """How a set's documents are made to fit a small context.

    Attributes:
        max_passages: most documents a question.
        max_passage_chars: code points kept of each document.
    """

    max_passages: int
    max_passage_chars: int


SETS = {
    "hotpotqa": CutTo(max_passages=10, max_passage_chars=2000),
    "techqa": CutTo(max_passages=5, max_passage_chars=1600),
    "pubmedqa": CutTo(max_passages=5, max_passage_chars=2000),
}


HANDBOOK = Path(__file__).parents[1] / "examples" / "handbook"
HANDBOOK_CUT = CutTo(max_passages=8, max_passage_chars=2000)


def load_questions(folder: Path, name: str, *, limit: int) -> list[ClosedQuestion]:
    """Read the first ``limit`` questions of one of ``SETS``, documents cut to fit.

    Args:
        folder: holds ``NAME.jsonl`` with lines
            ``{"id", "question", "documents": [{"id", "title", "text"}]}``.
        name: a key of ``SETS``.
        limit: most questions.
    """
    with (folder / f"{name}.jsonl").open(encoding="utf-8") as file:  # texts hold other line breaks
        lines = list(itertools.islice(file, limit))
    return [_to_question(json.loads(line), SETS[name]) for line in lines]


def load_handbook(*, num_passages: int) -> list[ClosedQuestion]:
    """Read the example collection's questions, each with its gold documents and others.

    Args:
        num_passages: documents a question.
    """
    texts = {
        path.name: path.read_text(encoding="utf-8") for path in sorted(HANDBOOK.glob("docs/*.md"))
    }
    names = list(texts)
    questions = []
    for idx, line in enumerate((HANDBOOK / "questions.jsonl").read_text("utf-8").splitlines()):
        record = json.loads(line)
        gold = [name for name in record["files"] if name in texts]
        others = [name for name in names[idx:] + names[:idx] if name not in gold]
        chosen = [*gold, *others][:num_passages] if gold else []
        if chosen:
            documents = [{"id": name, "title": name, "text": texts[name]} for name in chosen]
            questions.append(_to_question({**record, "documents": documents}, HANDBOOK_CUT))
    return questions


def _to_question(record: dict[str, object], cut: CutTo) -> ClosedQuestion:
    documents = record["documents"]
    assert isinstance(documents, list)
    return ClosedQuestion(
        question_id=str(record["id"]),
        question=str(record["question"]),
        passages=tuple(
            _to_passage(document, cut.max_passage_chars)
            for document in documents[: cut.max_passages]
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
