"""Model-free drafting: continue the answer as its longest repeated suffix was continued before.

Answers over retrieved passages copy from them; a suffix of the answer that occurs in the prompt is
a good guess at what follows. The drafts are DETERMINISTIC (a function of committed tokens only).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import DraftBranch, DraftSource
from specrag_common.speculation.suffix_automaton import ROOT_STATE, SuffixAutomaton

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEFAULT_MIN_MATCH = 2
"""Shortest suffix worth continuing: a single repeated token predicts little."""


class SuffixDrafter:
    """Suffix drafting over a fixed corpus and the answer so far.

    One instance serves one answer: its text is the corpus (the drafter's subset, the conversation)
    followed by the committed tokens. Nothing is shared between instances.
    """

    __slots__ = ("_automaton", "_min_match")

    def __init__(
        self, corpus_token_ids: Iterable[int], *, min_match: int = DEFAULT_MIN_MATCH
    ) -> None:
        """Index ``corpus_token_ids`` in linear time (8,192 tokens: some tens of milliseconds).

        Args:
            corpus_token_ids: the prompt as the drafter sees it.
            min_match: shortest repeated suffix, in tokens, that is continued; >= 1.
        """
        if min_match < 1:
            raise ValueError(f"min_match={min_match} must be at least 1")
        self._automaton = SuffixAutomaton(corpus_token_ids)
        self._min_match = min_match

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens; amortised constant time a token."""
        self._automaton.extend(token_ids)

    def propose(self, max_tokens: int, max_branches: int = 1) -> list[DraftBranch]:
        """Return the best continuations of the longest repeated suffix, best first.

        Args:
            max_tokens: most tokens of a branch.
            max_branches: most branches; they differ in their first token.

        Returns:
            DETERMINISTIC branches; none when the match is shorter than ``min_match``.
        """
        if max_tokens < 1:
            return []
        branches = []
        for token_id, state in self._rank_first_tokens(max_branches):
            token_ids = (token_id, *self._follow(state, max_tokens - 1))
            branches.append(
                DraftBranch(
                    token_ids=token_ids,
                    laws=(None,) * len(token_ids),
                    source=DraftSource.SUFFIX,
                )
            )
        return branches

    def _rank_first_tokens(self, max_branches: int) -> Iterator[tuple[int, int]]:
        """Yield distinct first tokens with their states: longest match first, then frequency."""
        seen: set[int] = set()
        state = self._automaton.get_match().state
        while state > ROOT_STATE and self._automaton.get_length(state) >= self._min_match:
            for token_id, target in self._rank_continuations(state):
                if len(seen) == max_branches:
                    return
                if token_id not in seen:
                    seen.add(token_id)
                    yield token_id, target
            state = self._automaton.get_link(state)

    def _follow(self, state: int, num_tokens: int) -> list[int]:
        """Return up to ``num_tokens`` most likely tokens behind ``state``.

        At the end of the text the walk falls back to the longest earlier occurrence, so that a
        text that repeats itself goes on repeating.
        """
        token_ids: list[int] = []
        while len(token_ids) < num_tokens:
            continuations = self._rank_continuations(state)
            if continuations:
                token_id, state = continuations[0]
                token_ids.append(token_id)
                continue
            state = self._automaton.get_link(state)
            if self._automaton.get_length(state) < self._min_match:
                break
        return token_ids

    def _rank_continuations(self, state: int) -> list[tuple[int, int]]:
        """Return (token, next state) behind ``state``: most frequent first, then most recent."""
        automaton = self._automaton
        return sorted(
            automaton.get_continuations(state).items(),
            key=lambda item: (
                -automaton.get_count(item[1]),
                -automaton.get_last_end(item[1]),
                item[0],
            ),
        )
