from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specrag_retriever.chunking import TextPassage, split_into_passages
from specrag_retriever.documents import DocumentSkippedError, extract_document

if TYPE_CHECKING:
    from specrag_retriever.documents import ExtractedDocument
    from tokenizers import Tokenizer

FEW_EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def num_tokens(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def split(
    text: str, tokenizer: Tokenizer, max_tokens: int, name: str = "a.md"
) -> tuple[ExtractedDocument, list[TextPassage]]:
    document = extract_document(text.encode(), name)
    return document, split_into_passages(document, tokenizer, max_tokens)


def check(document: ExtractedDocument, passages: list[TextPassage]) -> None:
    """Passages are stretches of the text, in order, and leave nothing visible out."""
    end = 0
    for passage in passages:
        assert document.text[passage.start : passage.end] == passage.text
        assert not document.text[end : passage.start].strip()
        end = passage.end
    assert not document.text[end:].strip()


def test_short_document_is_one_passage(tokenizer: Tokenizer) -> None:
    document, passages = split("# Title\n\nA few words.\n\n## Part\n\nMore.", tokenizer, 384)
    check(document, passages)
    assert [passage.text for passage in passages] == [document.text]


def test_heading_stays_with_its_text(tokenizer: Tokenizer) -> None:
    body = "some words about the matter at hand, again and again. " * 3
    text = "\n\n".join(f"## Part {index}\n\n{body}" for index in range(8))
    document, passages = split(text, tokenizer, 64)
    check(document, passages)
    for passage in passages:
        assert not passage.text.rsplit("\n", 1)[-1].startswith("Part")
        assert passage.text.startswith("Part")


def test_headings_above_a_passage_are_its_path(tokenizer: Tokenizer) -> None:
    body = "words of the section go on and on. " * 20
    text = f"# Book\n\n## Chapter\n\n{body}\n\n### Deep\n\n{body}\n\n## Next\n\nlast words"
    document, passages = split(text, tokenizer, 50)
    check(document, passages)
    assert passages[0].headings == ()
    assert passages[1].headings == ("Book", "Chapter")
    deep = next(one for one in passages if one.text.startswith("Deep"))
    assert deep.headings == ("Book", "Chapter")
    assert passages[passages.index(deep) + 1].headings == ("Book", "Chapter", "Deep")
    assert next(one for one in passages if "last words" in one.text).headings[:1] == ("Book",)


def test_table_rows_are_not_torn(tokenizer: Tokenizer) -> None:
    rows = "\n".join(f"| item{index} | {index} euro | red |" for index in range(60))
    document, passages = split(f"| Name | Price | Colour |\n|-|-|-|\n{rows}\n", tokenizer, 64)
    check(document, passages)
    assert len(passages) > 5
    for passage in passages:
        assert passage.text.startswith("Name: item")
        assert passage.text.endswith("Colour: red")


def test_one_endless_word_is_cut(tokenizer: Tokenizer) -> None:
    text = "Key record.\n\nBlob: " + "Zm9vYmFy" * 1250 + "\n\nThe officer is Mara."
    document, passages = split(text, tokenizer, 64, "a.txt")
    check(document, passages)
    assert passages[0].text.startswith("Key record.\n\nBlob:")
    assert passages[-1].text.endswith("The officer is Mara.")


@FEW_EXAMPLES
@given(
    st.lists(
        st.one_of(
            st.text(max_size=200),
            st.sampled_from(
                ["# H", "## Sub", "- item", "| a | b |\n|-|-|\n| 1 | 2 |", "日本語" * 50]
            ),
        ),
        max_size=12,
    ),
    st.integers(8, 80),
)
def test_passages_cover_any_document_within_the_budget(
    tokenizer: Tokenizer, parts: list[str], max_tokens: int
) -> None:
    try:
        document, passages = split("\n\n".join(parts), tokenizer, max_tokens)
    except DocumentSkippedError:
        return
    check(document, passages)
    for passage in passages:
        assert num_tokens(tokenizer, passage.text) <= max_tokens
