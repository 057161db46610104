"""Who reads which passages."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from bench.merging.lexical import rank_by_words

if TYPE_CHECKING:
    from bench.question_sets import ClosedQuestion

NUMBERS_OF_DRAFTERS = (2, 4, 5)


def split_by_number(num_passages: int, num_drafters: int) -> list[tuple[int, ...]]:
    """Return the subsets as the orchestrator makes them: passage ``n`` to drafter ``n mod M``."""
    return [tuple(range(idx, num_passages, num_drafters)) for idx in range(num_drafters)]


def split_contiguously(num_passages: int, num_drafters: int) -> list[tuple[int, ...]]:
    """Return neighbouring passages together."""
    bounds = [num_passages * idx // num_drafters for idx in range(num_drafters + 1)]
    return [tuple(range(*pair)) for pair in itertools.pairwise(bounds)]


def split_with_best(question: ClosedQuestion, num_drafters: int) -> list[tuple[int, ...]]:
    """Return the numbered split with the passages most like the question in every subset.

    The two best are shared by all, the others dealt out.
    """
    order = rank_by_words(question.question, [one.text for one in question.passages])
    best, rest = order[:2], sorted(order[2:])
    return [tuple(sorted({*best, *rest[idx::num_drafters]})) for idx in range(num_drafters)]
