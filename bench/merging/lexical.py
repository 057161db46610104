"""Ranks texts by the rare words they share with a question."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD = re.compile(r"\w+")


def rank_by_words(question: str, texts: Sequence[str]) -> list[int]:
    """Return the indices of the texts, best first; the first ones win ties."""
    words = [set(_WORD.findall(text.lower())) for text in texts]
    num_with = Counter(word for own in words for word in own)
    asked = set(_WORD.findall(question.lower()))
    scores = [sum(math.log(len(texts) / num_with[word]) for word in asked & own) for own in words]
    return sorted(range(len(texts)), key=lambda idx: (-scores[idx], idx))
