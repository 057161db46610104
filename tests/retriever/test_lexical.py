from __future__ import annotations

from specrag_retriever.lexical import lexical_query, lexical_text


def test_ligatures_and_full_width_letters_are_spelt_out() -> None:
    assert lexical_text("re\ufb02ow ＡＢＣ") == "reflow ABC"


def test_scripts_without_spaces_are_split_into_characters() -> None:
    assert lexical_text("退款abc정책") == "退 款 abc 정 책"


def test_query_loses_its_function_words() -> None:
    assert lexical_query("What is the meal limit?") == "meal limit"


def test_query_of_function_words_only_keeps_them() -> None:
    assert lexical_query("To be or not to be?") == "not"
    assert lexical_query("Who is it?") == "who is it"


def test_query_without_words_is_empty() -> None:
    assert lexical_query("?! …") == ""
