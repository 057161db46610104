"""Which passage each sentence of an answer is attributed to."""

from __future__ import annotations

import random

import pytest
from specrag_orchestrator.citations import Citation, CitationFinder, CitationMethod
from specrag_orchestrator.passages import SourcePassage


def passage(number: int, text: str, start_char: int = 0) -> SourcePassage:
    return SourcePassage(chunk_id=f"c{number}", number=number, text=text, start_char=start_char)


HANDBOOK = [
    passage(1, "Annual leave is 27 days. Carry-over ends in March.", start_char=100),
    passage(2, "Travel over 500 euros is approved by Ada Lindqvist."),
    passage(4, "東京は日本の首都です。大阪は西にあります。"),
]


def cite(answer: str, question: str = "") -> list[Citation]:
    return CitationFinder(HANDBOOK, question).finish(answer)


def summary(citations: list[Citation], answer: str) -> list[tuple[int, str, str]]:
    return [(one.passage.number, answer[one.start : one.end], one.method) for one in citations]


def test_number_the_model_wrote_is_an_inline_citation_of_its_sentence() -> None:
    answer = "You get 27 days [1]. Ada approves travel [2]."
    assert summary(cite(answer), answer) == [
        (1, "You get 27 days [1].", "inline"),
        (2, "Ada approves travel [2].", "inline"),
    ]


def test_marker_behind_the_full_stop_belongs_to_the_sentence_before() -> None:
    answer = "You get 27 days. [1] Ada approves travel.[2]"
    assert summary(cite(answer), answer) == [
        (1, "You get 27 days. [1]", "inline"),
        (2, "Ada approves travel.[2]", "inline"),
    ]


@pytest.mark.parametrize("marker", ["[1, 2]", "[1][2]", "[1] [2]", "[1;2]", "【1】【2】"])
def test_several_numbers_in_one_sentence_are_all_cited(marker: str) -> None:
    assert [one.passage.number for one in cite(f"Both hold {marker}.")] == [1, 2]


def test_number_of_a_passage_the_target_has_not_read_is_counted_and_never_cited() -> None:
    finder = CitationFinder(HANDBOOK)
    assert finder.finish("Bees dance [3]. Wasps do not [99].") == []
    assert finder.num_unknown_markers == 2


def test_sentence_with_only_unknown_numbers_is_attributed_by_its_words() -> None:
    (citation,) = cite("Annual leave is 27 days [9].")
    assert (citation.passage.number, citation.method) == (1, CitationMethod.LEXICAL)


def test_sentence_without_a_number_is_attributed_by_its_words() -> None:
    answer = "Travel over 500 euros is approved by Ada Lindqvist. Bees dance in the sun."
    (citation,) = cite(answer)
    assert summary([citation], answer) == [
        (2, "Travel over 500 euros is approved by Ada Lindqvist.", "lexical")
    ]
    assert citation.support == 1.0


def test_source_span_is_the_supporting_sentence_in_the_document() -> None:
    (citation,) = cite("Carry-over ends in March.")
    text = HANDBOOK[0].text
    assert citation.source_start == 100 + text.index("Carry")
    assert citation.source_end == 100 + len(text)


def test_support_is_the_share_of_words_found() -> None:
    (citation,) = cite("Annual leave is 30 weeks [1].")
    assert citation.support == pytest.approx(0.5)


def test_weak_overlap_is_not_a_citation() -> None:
    assert cite("Leave the building when bees dance.") == []


METER = SourcePassage(
    chunk_id="c7", number=7, title="Otter 2 handheld meter", text="It weighs 310 grams. It floats."
)


def test_title_names_what_the_sentence_is_about() -> None:
    (citation,) = CitationFinder([METER]).finish("The weight of the Otter 2 is 310 grams.")
    assert (citation.passage.number, citation.source_start, citation.source_end) == (7, 0, 20)
    assert citation.support == pytest.approx(4 / 5)


def test_title_alone_supports_nothing() -> None:
    assert CitationFinder([METER]).finish("The Otter 2 handheld meter is red.") == []


def test_cjk_is_compared_by_pairs_of_characters() -> None:
    answer = "日本の首都は東京です。"
    (citation,) = cite("東京は日本の首都です。")
    assert citation.passage.number == 4
    assert citation.support == 1.0
    assert [one.passage.number for one in cite(answer)] in ([4], [])


def test_full_width_and_case_do_not_matter() -> None:
    (citation,) = cite("ＴＲＡＶＥＬ over ５００ EUROS is approved by ADA LINDQVIST.")
    assert citation.passage.number == 2


def test_question_decides_between_equal_sources() -> None:
    sources = [passage(1, "Lunch costs 27 euros."), passage(2, "Annual leave is 27 days.")]
    (citation,) = CitationFinder(sources, "How long is annual leave?").finish("27")
    assert citation.passage.number == 2


def test_bare_answer_is_attributed_whatever_words_frame_it() -> None:
    (citation,) = cite("The answer is: 27 days", "How long is annual leave?")
    assert (citation.passage.number, citation.support) == (1, 1.0)


def test_abbreviations_and_list_numbers_do_not_end_a_sentence() -> None:
    answer = "1. Dr. Ada Lindqvist approves travel over 500 euros, e.g. by train [2]."
    assert summary(cite(answer), answer) == [(2, answer, "inline")]


def test_citation_comes_once_its_sentence_is_complete() -> None:
    finder = CitationFinder(HANDBOOK)
    assert finder.update("You get 27 days") == []
    assert finder.update("You get 27 days.") == []
    assert finder.update("You get 27 days. [") == []
    assert finder.update("You get 27 days. [1]") == []
    (citation,) = finder.update("You get 27 days. [1] And")
    assert citation.method == CitationMethod.INLINE
    assert finder.finish("You get 27 days. [1] And") == []


@pytest.mark.parametrize("seed", range(20))
def test_citations_do_not_depend_on_how_the_answer_is_cut(seed: int) -> None:
    answer = (
        "You get 27 days [1]. Travel over 500 euros is approved by Ada Lindqvist. [2] [1] "
        "東京は日本の首都です。[4]大阪は西にあります。\n- Carry-over ends in March.\nBees."
    )
    rng = random.Random(seed)
    finder, found, end = CitationFinder(HANDBOOK), [], 0
    while end < len(answer):
        end = min(len(answer), end + rng.randint(1, 9))
        found += finder.update(answer[:end])
    found += finder.finish(answer)
    assert found == cite(answer)
    assert len(found) >= 6


def test_answer_without_passages_has_no_citations() -> None:
    assert CitationFinder(()).finish("Anything [1]. At all.") == []
