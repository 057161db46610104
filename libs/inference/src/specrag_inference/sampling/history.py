"""The tokens before the one whose law is made, counted once each.

Invariant kept: counts are a function of the sequence's own token list and of the tree path, never
of rounds. Committed tokens are counted when they are first seen in the list, a path is added to a
copy: after a batch of five accepted tokens the state equals that of five single steps, and after a
round that rejects everything it is what it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_FIRST_CAPACITY = 64


class TokenCounts(NamedTuple):
    """Distinct tokens, in no particular order; read them, mutate them never.

    Attributes:
        token_ids: [num_distinct] int64.
        counts: [num_distinct] int64, how often each came, at least 1.
    """

    token_ids: NDArray[np.int64]
    counts: NDArray[np.int64]


class CommittedTokens:
    """The committed tokens of one sequence, with counts that catch up when they are asked for.

    A prompt of 8,000 tokens is counted once a sequence, not once a node.
    """

    __slots__ = ("_answer_counts", "_counts", "_num_prompt_tokens", "_token_ids")

    def __init__(self, token_ids: Sequence[int], *, num_prompt_tokens: int) -> None:
        """Watch a list.

        Args:
            token_ids: prompt, then committed answer tokens: the sequence's own list, which is only
                ever appended to.
            num_prompt_tokens: how many of them are the prompt.
        """
        self._token_ids = token_ids
        self._num_prompt_tokens = num_prompt_tokens
        self._counts = _GrowingCounts(token_ids, start=0)
        self._answer_counts = _GrowingCounts(token_ids, start=num_prompt_tokens)

    @property
    def num_answer_tokens(self) -> int:
        """Committed answer tokens."""
        return len(self._token_ids) - self._num_prompt_tokens

    @property
    def answer_token_ids(self) -> Sequence[int]:
        """A copy of the committed answer tokens."""
        return self._token_ids[self._num_prompt_tokens :]

    def count_all(self, path: Sequence[int]) -> TokenCounts:
        """Return the distinct tokens of prompt, answer and ``path``."""
        return self._counts.count_with(path)

    def count_answer(self, path: Sequence[int]) -> TokenCounts:
        """Return the distinct tokens of answer and ``path``."""
        return self._answer_counts.count_with(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHistory:
    """The tokens before the one whose law is made.

    Attributes:
        committed: the sequence's committed tokens; may be shared by all nodes of a tree.
        path: tokens from the first level of the tree down to the node; empty at the root.
    """

    committed: CommittedTokens
    path: Sequence[int] = ()

    @classmethod
    def of(
        cls,
        *,
        prompt_token_ids: Sequence[int] = (),
        answer_token_ids: Sequence[int] = (),
        path: Sequence[int] = (),
    ) -> TokenHistory:
        """Return a history that stands alone, without a sequence."""
        committed = CommittedTokens(
            (*prompt_token_ids, *answer_token_ids), num_prompt_tokens=len(prompt_token_ids)
        )
        return cls(committed=committed, path=path)

    @property
    def num_answer_tokens(self) -> int:
        """Answer tokens before this one: its absolute answer position."""
        return self.committed.num_answer_tokens + len(self.path)

    def count_all(self) -> TokenCounts:
        """Return the distinct tokens of prompt and answer, the path included."""
        return self.committed.count_all(self.path)

    def count_answer(self) -> TokenCounts:
        """Return the distinct tokens of the answer, the path included."""
        return self.committed.count_answer(self.path)


@dataclass(slots=True)
class _GrowingCounts:
    """Counts over ``source[start:]``; the arrays grow in place."""

    source: Sequence[int]
    start: int
    _num_distinct: int = 0
    _index: dict[int, int] = field(default_factory=dict)
    _token_ids: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(_FIRST_CAPACITY, dtype=np.int64)
    )
    _counts: NDArray[np.int64] = field(
        default_factory=lambda: np.empty(_FIRST_CAPACITY, dtype=np.int64)
    )

    def count_with(self, path: Sequence[int]) -> TokenCounts:
        """Return the counts of the source and ``path`` together; the path leaves no trace."""
        if len(self.source) > self.start:
            self._catch_up()
        token_ids, counts = (
            self._token_ids[: self._num_distinct],
            self._counts[: self._num_distinct],
        )
        if not path:
            return TokenCounts(token_ids, counts)
        counts = counts.copy()
        added = Counter(path)
        for token_id in [token_id for token_id in added if token_id in self._index]:
            counts[self._index[token_id]] += added.pop(token_id)
        return TokenCounts(
            np.concatenate([token_ids, np.fromiter(added.keys(), dtype=np.int64)]),
            np.concatenate([counts, np.fromiter(added.values(), dtype=np.int64)]),
        )

    def _catch_up(self) -> None:
        """Count what was appended to the source since the last call."""
        added = Counter(self.source[self.start :])
        self.start = len(self.source)
        self._reserve(self._num_distinct + len(added))
        for token_id, count in added.items():
            idx = self._index.setdefault(token_id, self._num_distinct)
            if idx == self._num_distinct:
                self._num_distinct += 1
                self._token_ids[idx], self._counts[idx] = token_id, 0
            self._counts[idx] += count

    def _reserve(self, capacity: int) -> None:
        if capacity > len(self._token_ids):
            capacity = max(capacity, 2 * len(self._token_ids))
            self._token_ids = np.resize(self._token_ids, capacity)
            self._counts = np.resize(self._counts, capacity)


NO_HISTORY = TokenHistory.of()
"""Before the first token, without a prompt."""
