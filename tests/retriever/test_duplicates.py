from __future__ import annotations

from specrag_retriever.duplicates import DuplicateFilter


def kept(*texts: str) -> list[str]:
    duplicates = DuplicateFilter()
    return [text for text in texts if duplicates.keep(text)]


def test_texts_that_read_the_same_are_kept_once() -> None:
    assert kept("Open at 08:00.", "open  at\n08:00", "OPEN AT 08:00!") == ["Open at 08:00."]


def test_two_of_many_near_copies_are_kept() -> None:
    base = "The Lyon office opens at eight and closes at half past six on working days copy"
    copies = [f"{base} {index}" for index in range(12)]
    assert kept(*copies) == copies[:2]


def test_contradicting_versions_are_both_kept() -> None:
    texts = ["Business class on flights over 6 hours.", "Business class on flights over 9 hours."]
    assert kept(*texts) == texts


def test_different_texts_are_kept() -> None:
    assert len(kept("red green blue", "red green yellow", "", "…")) == 3
