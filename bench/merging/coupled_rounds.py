"""Rounds whose outcome a trace decides without chance: temperature 0, and COUPLED at any.

The committed tokens are the same whatever is proposed, so every set of drafters is replayed along
the one recorded answer, through the project's own merging and walk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.speculation.randomness import RandomStream
from specrag_common.speculation.suffix_drafter import SuffixDrafter
from specrag_inference.verification import walk_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Protocol

    from numpy.typing import NDArray

    class Drafter(Protocol):
        """Proposes along one recorded answer."""

        def propose(self, position: int, gamma: int) -> list[tuple[int, ...]]:
            """Return branches behind ``position`` committed tokens.

            A branch may end where it leaves the answer: nothing behind can be accepted.
            """
            ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What some rounds did.

    Attributes:
        num_rounds: target passes.
        num_tokens: committed tokens, accepted and final ones together.
        num_nodes: tree nodes, summed over rounds; as far as branches follow the answer.
        num_uncut_rounds: passes that the answer's end could not cut short: more than gamma tokens
            were left.
        num_uncut_tokens: tokens of those.
    """

    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_uncut_rounds: int = 0
    num_uncut_tokens: int = 0

    @classmethod
    def of_round(cls, num_tokens: int, num_nodes: int, *, is_uncut: bool) -> Tally:
        """Return the tally of one round."""
        return cls(
            num_rounds=1,
            num_tokens=num_tokens,
            num_nodes=num_nodes,
            num_uncut_rounds=int(is_uncut),
            num_uncut_tokens=num_tokens * is_uncut,
        )

    def __add__(self, other: Tally) -> Tally:
        """Return both together."""
        return Tally(
            num_rounds=self.num_rounds + other.num_rounds,
            num_tokens=self.num_tokens + other.num_tokens,
            num_nodes=self.num_nodes + other.num_nodes,
            num_uncut_rounds=self.num_uncut_rounds + other.num_uncut_rounds,
            num_uncut_tokens=self.num_uncut_tokens + other.num_uncut_tokens,
        )

    @property
    def tokens_a_round(self) -> float:
        """Committed tokens a target pass."""
        return self.num_tokens / self.num_rounds

    @property
    def tokens_an_uncut_round(self) -> float:
        """Committed tokens a target pass that the answer's end could not cut short."""
        return self.num_uncut_tokens / self.num_uncut_rounds


class ModelDrafter:
    """A draft model's branches, from its choices by rank along the answer."""

    def __init__(
        self, choices: NDArray[np.int32], answer_ids: Sequence[int], *, num_branches: int = 1
    ) -> None:
        """Follow ``choices`` [num_tokens, num_ranks]; branch b begins with rank b."""
        self._choices = choices.tolist()
        self._answer_ids = answer_ids
        self._num_branches = num_branches

    def propose(self, position: int, gamma: int) -> list[tuple[int, ...]]:
        """Return branches that begin with the best tokens and go on with the best one."""
        return [self._follow(position, gamma, rank) for rank in range(self._num_branches)]

    def _follow(self, position: int, gamma: int, rank: int) -> tuple[int, ...]:
        branch: list[int] = []
        for offset in range(position, min(position + gamma, len(self._answer_ids))):
            branch.append(self._choices[offset][0 if branch else rank])
            if branch[-1] != self._answer_ids[offset]:
                break
        return tuple(branch)


class DeviatingDrafter(ModelDrafter):
    """Branches that leave the best path once, at any of its first tokens, for the second best."""

    def __init__(
        self, choices: NDArray[np.int32], answer_ids: Sequence[int], *, max_depth: int
    ) -> None:
        """Leave the best path at depths below ``max_depth``."""
        super().__init__(choices, answer_ids)
        self._max_depth = max_depth

    def propose(self, position: int, gamma: int) -> list[tuple[int, ...]]:
        """Return the best path, then one branch a depth at which it is still on the answer."""
        best = self._follow(position, gamma, 0)
        branches = [best]
        for depth in range(min(self._max_depth, len(best))):
            tail = self._follow(position + depth, gamma - depth, 1)
            branches.append((*best[:depth], *tail))
        return branches


class SuffixSource:
    """The product's suffix drafter over one drafter's prompt and the answer so far."""

    def __init__(self, prompt_ids: Iterable[int], answer_ids: Sequence[int], *, gamma: int) -> None:
        """Propose up to ``gamma`` tokens at every position, once and for all."""
        drafter = SuffixDrafter(prompt_ids)
        self._branches: list[list[tuple[int, ...]]] = []
        for token_id in answer_ids:
            self._branches.append([branch.token_ids for branch in drafter.propose(gamma)])
            drafter.extend([token_id])

    def propose(self, position: int, gamma: int) -> list[tuple[int, ...]]:
        """Return branches copied from the text."""
        return [branch[:gamma] for branch in self._branches[position]]


def replay_rounds(
    answer_ids: Sequence[int], drafters: Sequence[Drafter], *, gamma: int, max_nodes: int
) -> Tally:
    """Return what the rounds of one answer do.

    Args:
        answer_ids: what the target commits.
        drafters: propose every round; several sources of one drafter count as several here.
        gamma: most tokens a branch.
        max_nodes: budget of proposed tokens a round.
    """
    tally, position = Tally(), 0
    while position < len(answer_ids):
        proposals = [
            _to_proposal(index, drafter.propose(position, gamma), position, gamma)
            for index, drafter in enumerate(drafters)
        ]
        tree = merge_proposals(proposals, max_draft_tokens=max_nodes)
        walk = walk_tree(
            tree,
            _AnswerLaws(answer_ids[position:]),
            mode=VerificationMode.COUPLED,
            random=RandomStream(bytes(16)),
            position=position,
        )
        num_left = len(answer_ids) - position
        num_tokens = min(len(walk.path) + 1, num_left)
        tally += Tally.of_round(num_tokens, tree.num_nodes, is_uncut=num_left > gamma)
        position += num_tokens
    return tally


class _AnswerLaws:
    """One-hot laws along the answer; behind its end, a token that nobody proposes."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._size = int(max(token_ids)) + 2

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.float64]:  # noqa: ARG002 - part of the seam
        """Return the law of the token behind a path."""
        law = np.zeros(self._size)
        is_over = len(path) >= len(self._token_ids)
        law[self._size - 1 if is_over else self._token_ids[len(path)]] = 1.0
        return law


def _to_proposal(
    index: int, branches: Sequence[tuple[int, ...]], position: int, gamma: int
) -> DraftProposal:
    return DraftProposal(
        drafter_index=index,
        committed_length=position,
        branches=tuple(
            DraftBranch(token_ids=ids, laws=(None,) * len(ids), source=DraftSource.MODEL)
            for ids in branches
        ),
        gamma=gamma,
    )
