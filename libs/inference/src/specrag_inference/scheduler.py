"""Decides which extensions share the next forward pass. Pure: candidates in, plan out.

*Quick* extensions (decode steps, trees, drafting steps) go first, those served longest ago in
front, so that every running sequence moves within a few passes. *Bulk* ones (prefill, scoring, very
large trees) take what is left of the token budget in chunks, oldest sequence first; while quick
ones share the pass a chunk is smaller, because its length is their latency.

Nobody waits without bound. Bulk work of a running sequence that was passed over ``max_passed_over``
times goes to the front of its kind, and the front goes before the quick ones unless one of them has
waited longer still. A sequence that was passed over and lacks blocks gets the next ones that become
free: those behind it may only go on in blocks they hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What bounds one forward pass.

    Attributes:
        max_step_tokens: most tokens of one pass.
        max_shared_prefill_tokens: most tokens of bulk work in a pass that quick work shares.
        block_size: tokens a block.
        max_passed_over: passes that bulk work may be left out of before it goes first.
    """

    max_step_tokens: int
    max_shared_prefill_tokens: int
    block_size: int
    max_passed_over: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One sequence that needs a forward pass.

    Attributes:
        sequence_id: whose.
        order: when the sequence was opened, in increasing numbers.
        last_turn: when it was served last, in increasing numbers.
        num_passed_over: passes since it asked in which it had no share.
        num_chain: committed tokens to compute.
        num_nodes: tree nodes to compute behind the chain's end.
        num_positions: positions its cache blocks must hold before the extension.
        num_resident: tree nodes already cached behind them.
        num_held_blocks: blocks it has.
        num_shared_blocks: blocks in the way of writing that it must copy first.
        is_opening: its prompt is not in the cache yet, so nobody waits for its next token.
        nodes_can_wait: any leading part of the nodes may be computed alone.
    """

    sequence_id: str
    order: int
    last_turn: int
    num_chain: int
    num_nodes: int
    num_positions: int
    num_resident: int
    num_held_blocks: int
    num_shared_blocks: int = 0
    num_passed_over: int = 0
    is_opening: bool = False
    nodes_can_wait: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole extension."""
        return self.num_chain + self.num_nodes

    @property
    def num_end_tokens(self) -> int:
        """Fewest tokens that must be computed together to reach the chain's end."""
        num_nodes = min(self.num_nodes, 1) if self.nodes_can_wait else self.num_nodes
        return min(self.num_chain, 1) + num_nodes

    def count_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the blocks that computing ``num_tokens`` of it takes from the pool."""
        needed = -(-(self.num_positions + self.num_resident + num_tokens) // block_size)
        return max(0, needed - self.num_held_blocks) + self.num_shared_blocks

    def cut(self, max_tokens: int) -> Grant | None:
        """Return the largest share of at most ``max_tokens`` tokens, ``None`` when there is none.

        A share either stays before the chain's last token, or reaches it together with nodes: with
        all of them, or with as many as fit where they can wait.
        """
        if self.num_tokens <= max_tokens:
            return Grant(self.sequence_id, self.num_chain, self.num_nodes, ends_chain=True)
        num_nodes = max_tokens - self.num_chain
        if self.nodes_can_wait and num_nodes > 0:
            return Grant(self.sequence_id, self.num_chain, num_nodes, ends_chain=True)
        num_chain = min(self.num_chain - 1, max_tokens)
        return Grant(self.sequence_id, num_chain, 0, ends_chain=False) if num_chain > 0 else None


@dataclass(frozen=True, slots=True)
class Grant:
    """One sequence's share of the pass.

    Attributes:
        sequence_id: whose.
        num_chain: chain tokens computed now.
        num_nodes: tree nodes computed now.
        ends_chain: the chain is computed to its end, so that its logits and the nodes' are due;
            otherwise the share is a chunk of the chain.
    """

    sequence_id: str
    num_chain: int
    num_nodes: int
    ends_chain: bool

    @property
    def num_tokens(self) -> int:
        """Tokens computed now."""
        return self.num_chain + self.num_nodes


def plan_step(
    candidates: Sequence[Candidate], *, num_free_blocks: int, limits: SchedulerLimits
) -> tuple[Grant, ...]:
    """Return the shares of the next pass; empty when nobody's blocks fit.

    Neither the token budget nor the free blocks are exceeded.
    """
    shared_limit = limits.max_shared_prefill_tokens
    quick = sorted(
        (c for c in candidates if c.num_tokens <= shared_limit),
        key=lambda c: (c.last_turn, c.order),
    )
    bulk = sorted(
        (c for c in candidates if c.num_tokens > shared_limit),
        key=lambda c: (-_count_overdue_passes(c, limits), c.order),
    )
    budget = _Budget(num_free_blocks, limits)
    grants: list[Grant | None] = []
    longest_wait = max((c.num_passed_over for c in quick), default=0)
    if quick and bulk and bulk[0].num_passed_over >= max(limits.max_passed_over, longest_wait):
        first = bulk.pop(0)
        grants.append(budget.take(first, max(shared_limit, first.num_end_tokens)))
    grants += [budget.take_whole(candidate) for candidate in quick]
    bulk_left = shared_limit if any(grants) else limits.max_step_tokens
    for candidate in bulk:
        grant = budget.take(candidate, bulk_left)
        if grant is not None:
            bulk_left -= grant.num_tokens
            grants.append(grant)
    return tuple(grant for grant in grants if grant is not None)


def _count_overdue_passes(candidate: Candidate, limits: SchedulerLimits) -> int:
    """Return the passes a running sequence has been left out of; 0 until they are too many."""
    if candidate.is_opening or not _is_overdue(candidate, limits):
        return 0
    return candidate.num_passed_over


def _is_overdue(candidate: Candidate, limits: SchedulerLimits) -> bool:
    return candidate.num_passed_over >= limits.max_passed_over


class _Budget:
    """Tokens and blocks that are left for the pass.

    An overdue candidate that fails for blocks keeps those left from all that come later.
    """

    def __init__(self, num_blocks: int, limits: SchedulerLimits) -> None:
        self._num_tokens = limits.max_step_tokens
        self._num_blocks = num_blocks
        self._limits = limits

    def take_whole(self, candidate: Candidate) -> Grant | None:
        """Take the whole extension; ``None`` and untouched when it does not fit."""
        num_tokens = candidate.num_tokens
        if num_tokens > self._num_tokens:
            return None
        fits = self._count_fitting_tokens(candidate) >= num_tokens
        return self._take(candidate, candidate.cut(num_tokens) if fits else None)

    def take(self, candidate: Candidate, max_tokens: int) -> Grant | None:
        """Take as much of the extension as fits and ``max_tokens`` allow; perhaps nothing."""
        allowed = min(max_tokens, self._num_tokens)
        if candidate.cut(allowed) is None:
            return None
        return self._take(
            candidate, candidate.cut(min(allowed, self._count_fitting_tokens(candidate)))
        )

    def _take(self, candidate: Candidate, grant: Grant | None) -> Grant | None:
        if grant is not None:
            self._num_tokens -= grant.num_tokens
            self._num_blocks -= candidate.count_blocks(grant.num_tokens, self._limits.block_size)
        elif _is_overdue(candidate, self._limits):
            self._num_blocks = 0
        return grant

    def _count_fitting_tokens(self, candidate: Candidate) -> int:
        """Return how many tokens of the candidate the free blocks have room for."""
        num_new = self._num_blocks - candidate.num_shared_blocks
        if num_new < 0:
            return 0
        room = (candidate.num_held_blocks + num_new) * self._limits.block_size
        return max(0, room - candidate.num_positions - candidate.num_resident)
