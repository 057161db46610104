"""A suffix automaton that grows token by token and knows how often and where things occurred.

Every state stands for the substrings of the text that end at one common set of positions; the
longest of them has length ``length``. The suffix link of the state of the whole text is therefore
the longest suffix that also occurs earlier, found in constant time after each extension.

Source: Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ROOT_STATE = 0
"""The state of the empty string."""

_MAX_COUNTED_LINKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixMatch:
    """The longest suffix of the text that also occurs earlier.

    Attributes:
        state: its state in the automaton; ``ROOT_STATE`` when even the last token is seen first.
        length: its number of tokens.
    """

    state: int
    length: int


class SuffixAutomaton:
    """Suffix automaton over integers; extension costs amortised constant time, memory is linear.

    Counts and last positions of states deeper than 256 suffix links above the end (a text that
    repeats itself for hundreds of tokens) are left as they were: they order continuations and
    decide nothing else.
    """

    __slots__ = ("_count", "_last", "_last_end", "_length", "_link", "_next", "_num_tokens")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        """Build over ``token_ids`` in linear time."""
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]
        self._last_end: list[int] = [-1]
        self._last = ROOT_STATE
        self._num_tokens = 0
        for token_id in token_ids:
            self._append_state(token_id, clone_counts=False)
        self._sum_counts()

    @property
    def num_tokens(self) -> int:
        """Length of the text."""
        return self._num_tokens

    def extend(self, token_ids: Iterable[int], *, weight: int = 1) -> None:
        """Append ``token_ids`` to the text; each counts as ``weight`` occurrences."""
        for token_id in token_ids:
            self._append_state(token_id, clone_counts=True)
            self._count_occurrence(weight)

    def get_match(self) -> SuffixMatch:
        """Return the longest suffix of the text that occurs earlier in it."""
        state = max(self._link[self._last], ROOT_STATE)
        return SuffixMatch(state=state, length=self._length[state])

    def get_continuations(self, state: int) -> Mapping[int, int]:
        """Return the state behind each token that ever followed ``state``; do not mutate it."""
        return self._next[state]

    def get_link(self, state: int) -> int:
        """Return the state of the longest shorter suffix with more occurrences; -1 at the root."""
        return self._link[state]

    def get_length(self, state: int) -> int:
        """Return the length of the longest substring of ``state``."""
        return self._length[state]

    def get_count(self, state: int) -> int:
        """Return how often the substrings of ``state`` occur in the text, by weight."""
        return self._count[state]

    def get_last_end(self, state: int) -> int:
        """Return the index of the token that ends their latest occurrence."""
        return self._last_end[state]

    def _append_state(self, token_id: int, *, clone_counts: bool) -> None:
        """Add one token: at most two states, links rewired; counts only of the two states."""
        current = self._add_state(self._length[self._last] + 1, {}, count=1, end=self._num_tokens)
        state = self._last
        while state != -1 and token_id not in self._next[state]:
            self._next[state][token_id] = current
            state = self._link[state]
        if state == -1:
            self._link[current] = ROOT_STATE
        else:
            self._link[current] = self._split(state, token_id, clone_counts=clone_counts)
        self._last = current
        self._num_tokens += 1

    def _split(self, state: int, token_id: int, *, clone_counts: bool) -> int:
        """Return the state of exactly ``state``'s longest string + token, cloning it if needed."""
        target = self._next[state][token_id]
        if self._length[target] == self._length[state] + 1:
            return target
        clone = self._add_state(
            self._length[state] + 1,
            dict(self._next[target]),
            count=self._count[target] if clone_counts else 0,
            end=self._last_end[target],
        )
        self._link[clone] = self._link[target]
        self._link[target] = clone
        while state != -1 and self._next[state].get(token_id) == target:
            self._next[state][token_id] = clone
            state = self._link[state]
        return clone

    def _add_state(self, length: int, transitions: dict[int, int], *, count: int, end: int) -> int:
        self._next.append(transitions)
        self._link.append(-1)
        self._length.append(length)
        self._count.append(count)
        self._last_end.append(end)
        return len(self._length) - 1

    def _sum_counts(self) -> None:
        """Push counts and last positions up the suffix links, longest states first."""
        by_length = sorted(range(1, len(self._length)), key=self._length.__getitem__, reverse=True)
        for state in by_length:
            link = self._link[state]
            self._count[link] += self._count[state]
            self._last_end[link] = max(self._last_end[link], self._last_end[state])

    def _count_occurrence(self, weight: int) -> None:
        """Count the new end position at every suffix of the text."""
        self._count[self._last] = weight
        state = self._link[self._last]
        for _ in range(_MAX_COUNTED_LINKS):
            if state == -1:
                return
            self._count[state] += weight
            self._last_end[state] = self._num_tokens - 1
            state = self._link[state]
