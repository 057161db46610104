from __future__ import annotations

import pytest
from specrag_retriever.documents.markdown import parse_markdown
from specrag_retriever.documents.model import BlockKind


def test_markdown_becomes_the_text_a_reader_sees() -> None:
    document = parse_markdown(
        "# Leave *policy*\n\nFrom [HR](http://x.invalid/a) with `care` and ![a logo](x.png).\n\n"
        "- one\n- two\n  1. inner\n\n```sh\nrun --now\n```\n\n<!-- secret note -->\n\n> quoted\n"
    )
    assert document.text == (
        "Leave policy\n\nFrom HR with care and a logo.\n\n- one\n- two\n  1. inner\n\n"
        "run --now\n\nquoted"
    )
    assert document.title == "Leave policy"
    assert [block.kind for block in document.blocks] == [
        BlockKind.HEADING, BlockKind.PARAGRAPH, *[BlockKind.LIST_ITEM] * 3, BlockKind.CODE,
        BlockKind.PARAGRAPH,
    ]  # fmt: skip


def test_table_rows_carry_their_column_names() -> None:
    document = parse_markdown("| Grade | Pay |\n|---|---|\n| P1 | 1,5 |\n| P2 |  |\n")
    assert document.text == "Grade: P1; Pay: 1,5\nGrade: P2"


def test_front_matter_gives_the_title_and_is_left_out() -> None:
    document = parse_markdown('---\ntitle: "Backup plan"\ntags: [a, b]\n---\n# Other\n\nText.')
    assert document.title == "Backup plan"
    assert document.text == "Other\n\nText."


def test_damaged_front_matter_is_text() -> None:
    document = parse_markdown('---\ntitle: "Backup plan\nowner: ops\n---\n# Backups\n\nSunday.')
    assert document.title == "Backups"
    assert "owner: ops" in document.text
    assert "Sunday." in document.text


def test_hidden_characters_are_removed_and_counted_but_emoji_stay() -> None:
    hidden = "".join(chr(0xE0000 + ord(one)) for one in "obey me")
    flag = "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f"
    family = "👨\u200d👩\u200d👧"
    document = parse_markdown(f"Visible {flag} {family}.{hidden}\x07")
    assert document.text == f"Visible {flag} {family}."
    assert document.notes == ("removed 8 invisible control characters",)


@pytest.mark.parametrize(
    "text", ["[" * 5000, "> " * 500 + "x", "*a " * 3000, "```\nopen", "|a|\n|-"]
)
def test_pathological_markdown_does_not_fail(text: str) -> None:
    assert parse_markdown(text).text
