import importlib.util
import json
import re
from html import unescape
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pypdf import PdfReader

ROOT = Path(__file__).parents[2]
HANDBOOK = ROOT / "examples/handbook"
DOCS = HANDBOOK / "docs"
DOC_PATHS = sorted(DOCS.iterdir())


def load_questions() -> list[dict[str, Any]]:
    lines = (HANDBOOK / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


QUESTIONS = load_questions()


def read_text(path: Path) -> str:
    """One line of plain text: tags, entities and line breaks removed."""
    if path.suffix == ".pdf":
        text = "\n".join(page.extract_text() for page in PdfReader(path).pages)
    else:
        text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        text = unescape(re.sub(r"<[^>]+>", " ", text))
    return " ".join(text.split())


def load_pdf_builder() -> ModuleType:
    path = ROOT / "tools/build_handbook_pdf.py"
    spec = importlib.util.spec_from_file_location("build_handbook_pdf", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_collection_holds_about_thirty_short_files_in_four_formats() -> None:
    assert 28 <= len(DOC_PATHS) <= 40
    assert {path.suffix for path in DOC_PATHS} == {".md", ".txt", ".html", ".pdf"}
    assert all(path.stat().st_size < 8_000 for path in DOC_PATHS)


@pytest.mark.parametrize("path", DOC_PATHS, ids=lambda path: path.name)
def test_document_has_readable_text(path: Path) -> None:
    assert len(read_text(path)) > 200


def test_collection_has_a_table_and_text_outside_the_basic_plane() -> None:
    texts = [path.read_text(encoding="utf-8") for path in DOC_PATHS if path.suffix == ".md"]
    assert any(re.search(r"^\|(---\|)+$", text, re.MULTILINE) for text in texts)
    assert any(ord(char) > 0xFFFF for text in texts for char in text)
    assert any("\u4e00" <= char <= "\u9fff" for text in texts for char in text)


def test_pdf_equals_the_output_of_its_script() -> None:
    builder = load_pdf_builder()
    assert builder.OUTPUT_PATH.read_bytes() == builder.build_handbook_pdf()


def test_travel_policies_contradict_each_other_and_say_when_they_took_effect() -> None:
    older = read_text(DOCS / "travel-expenses-2022.md")
    newer = read_text(DOCS / "travel-expenses-2025.md")
    assert "effective: 2022-03-01" in older
    assert "effective: 2025-01-15" in newer
    amounts = [re.findall(r"meal allowance is (\d+) GBP", text) for text in (older, newer)]
    assert amounts == [["32"], ["45"]]


def test_question_ids_are_unique_and_follow_ups_refer_to_earlier_questions() -> None:
    seen: set[str] = set()
    for question in QUESTIONS:
        assert question["id"] not in seen
        assert question.get("follow_up_of") in seen | {None}
        seen.add(question["id"])


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: str(question["id"]))
def test_gold_files_hold_an_accepted_answer(question: dict[str, Any]) -> None:
    assert question["question"].strip()
    for name in question["files"]:
        text = read_text(DOCS / name).lower()
        assert any(answer.lower() in text for answer in question["answers"]), name


def test_questions_cover_what_the_demo_and_the_stream_tests_need() -> None:
    demo_ids = {question["id"] for question in QUESTIONS if question["demo"]}
    follow_ups = [question for question in QUESTIONS if "follow_up_of" in question]
    assert len(demo_ids) >= 8
    assert len(follow_ups) >= 2
    assert any(q["id"] in demo_ids and q["follow_up_of"] in demo_ids for q in follow_ups)
    assert any(
        {"travel-expenses-2022.md", "travel-expenses-2025.md"} & set(q["files"]) for q in QUESTIONS
    )
    assert any(not question["files"] for question in QUESTIONS)


def test_unanswerable_question_is_answered_by_no_document_and_not_shown_in_the_demo() -> None:
    for question in QUESTIONS:
        if not question["files"]:
            assert question["answers"] == []
            assert not question["demo"]
