"""Model-free drafting: continue the answer as what it repeats was continued before.

Answers over retrieved passages copy from them; where a suffix of the answer occurs in the prompt or
earlier in the answer, what followed there is a good guess. The guesses form a small tree, grown
best first: of all tokens that could come next to the tree, the one most likely to be reached is
taken, until none is reached with at least the probability asked for, or a limit is met. So a long
unambiguous match becomes one chain, and the tree forks only where continuations are close.

The drafts are DETERMINISTIC: a function of committed tokens only, shape included.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import DraftBranch, DraftSource
from specrag_common.speculation.suffix_automaton import ROOT_STATE, SuffixAutomaton
from specrag_common.speculation.suffix_estimates import Place, estimate_continuations

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

DEFAULT_MIN_PROBABILITY = 0.06
"""A token less likely to be reached is not worth its place in the verification pass, where nothing
better is known of what that place costs."""

MAX_NODES = 64
"""Most tokens of one tree."""

_ANSWER_WEIGHT = 2
"""How often a token of the answer counts: what the answer itself did it tends to do again."""


@dataclass(slots=True)
class _Node:
    """A token of the growing tree; its children are in the order in which they were taken."""

    token_id: int
    depth: int
    place: Place
    children: list[_Node] = field(default_factory=list)


class SuffixDrafter:
    """Suffix drafting over a fixed corpus and the answer so far.

    One instance serves one answer: its text is the corpus (the drafter's subset, the conversation)
    followed by the committed tokens. Nothing is shared between instances.
    """

    __slots__ = ("_automaton", "_end_token_ids", "_min_match")

    def __init__(
        self,
        corpus_token_ids: Iterable[int],
        *,
        min_match: int = 1,
        end_token_ids: Iterable[int] = (),
    ) -> None:
        """Index ``corpus_token_ids`` in linear time and memory.

        Args:
            corpus_token_ids: the prompt as the drafter sees it.
            min_match: shortest repeated suffix, in tokens, that is continued; >= 1.
            end_token_ids: nothing is proposed behind one of these.

        Raises:
            ValueError: ``min_match`` is out of range.
        """
        if min_match < 1:
            raise ValueError(f"min_match={min_match} must be at least 1")
        self._automaton = SuffixAutomaton(corpus_token_ids)
        self._end_token_ids = frozenset(end_token_ids)
        self._min_match = min_match

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens; amortised constant time a token."""
        self._automaton.extend(token_ids, weight=_ANSWER_WEIGHT)

    def propose(
        self,
        max_tokens: int,
        max_branches: int = 1,
        *,
        min_probability: float = DEFAULT_MIN_PROBABILITY,
    ) -> list[DraftBranch]:
        """Return the likeliest continuations of the longest repeated suffix.

        Args:
            max_tokens: most tokens of a branch.
            max_branches: most branches; branches may begin alike.
            min_probability: every token is reached with at least this, (0, 1].

        Returns:
            DETERMINISTIC branches, the likeliest at every fork first; none when nothing likely
            enough was seen.

        Raises:
            ValueError: ``min_probability`` is out of range.
        """
        if not 0.0 < min_probability <= 1.0:
            raise ValueError(f"min_probability={min_probability} is outside (0, 1]")
        match = self._automaton.get_match()
        if max_tokens < 1 or match.length < self._min_match or match.state == ROOT_STATE:
            return []
        root = _Node(token_id=-1, depth=0, place=Place(match.state, match.length))
        self._grow(root, max_tokens, max_branches, min_probability)
        return [
            DraftBranch(token_ids=path, laws=(None,) * len(path), source=DraftSource.SUFFIX)
            for path in _list_paths(root)
        ]

    def _grow(
        self, root: _Node, max_tokens: int, max_branches: int, min_probability: float
    ) -> None:
        """Take the likeliest next token of the whole tree, again and again."""
        # The serial number decides between equals: the candidate that was found first.
        frontier: list[tuple[float, int, _Node, _Node]] = []
        num_found = num_leaves = 0

        def look_behind(node: _Node, reached: float) -> None:
            nonlocal num_found
            if node.depth < max_tokens and node.token_id not in self._end_token_ids:
                for one in estimate_continuations(
                    self._automaton, node.place, min_probability=min_probability / reached
                ):
                    num_found += 1
                    child = _Node(one.token_id, node.depth + 1, one.place)
                    candidate = (-reached * one.probability, num_found, node, child)
                    heapq.heappush(frontier, candidate)

        look_behind(root, 1.0)
        for _ in range(MAX_NODES):
            while frontier and num_leaves == max_branches and _would_fork(frontier[0][2]):
                heapq.heappop(frontier)
            if not frontier:
                return
            negated, _, parent, child = heapq.heappop(frontier)
            num_leaves += _would_fork(parent)
            parent.children.append(child)
            look_behind(child, -negated)


def _would_fork(parent: _Node) -> bool:
    """Return whether another child of ``parent`` makes a branch of its own."""
    return parent.depth == 0 or bool(parent.children)


def _list_paths(root: _Node) -> Iterator[tuple[int, ...]]:
    """Yield the token ids from the root to each leaf, first children first."""
    stack: list[tuple[_Node, tuple[int, ...]]] = [(child, ()) for child in reversed(root.children)]
    while stack:
        node, path = stack.pop()
        path = (*path, node.token_id)
        if not node.children:
            yield path
        stack.extend((child, path) for child in reversed(node.children))
