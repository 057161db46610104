"""Leaves near-duplicates of better passages out of a result.

Two rules, applied from the best passage down:

- Passages that read the same (case, white space and punctuation aside) are kept once.
- Of passages that share most of their words but differ in some, two are kept. One alone would
  hide a contradiction ("6 hours" in one version, "9 hours" in the next); more would flood the
  result with copies.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from typing import Final

_WORD: Final = re.compile(r"\w+")
_MIN_SHARED_WORDS: Final = 0.8
_MAX_OF_A_KIND: Final = 2


class DuplicateFilter:
    """Remembers what was kept; O(kept passages) a question, over their distinct words."""

    def __init__(self) -> None:
        """Nothing kept yet."""
        self._digests: set[bytes] = set()
        self._groups: list[tuple[frozenset[str], int]] = []

    def keep(self, text: str) -> bool:
        """Tell whether ``text`` adds something to what was kept, and remember it if so."""
        words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
        digest = hashlib.sha256(" ".join(words).encode()).digest()
        if digest in self._digests:
            return False
        distinct = frozenset(words)
        index = self._group_of(distinct)
        if index is not None:
            leader, count = self._groups[index]
            if count >= _MAX_OF_A_KIND:
                return False
            self._groups[index] = leader, count + 1
        else:
            self._groups.append((distinct, 1))
        self._digests.add(digest)
        return True

    def _group_of(self, words: frozenset[str]) -> int | None:
        for index, (leader, _) in enumerate(self._groups):
            num_all = len(leader | words)
            if num_all and len(leader & words) >= _MIN_SHARED_WORDS * num_all:
                return index
        return None
