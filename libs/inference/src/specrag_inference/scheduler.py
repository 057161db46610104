"""Decides which extensions share the next forward pass. Pure: candidates in, plan out.

Short extensions (decode steps, trees, drafting steps) go first, those served longest ago in front,
so that every running sequence moves in each pass. Prefill takes what is left of the token budget in
chunks, oldest sequence first; while short extensions wait on the same pass the chunk is smaller,
because its length is their latency.
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
        max_shared_prefill_tokens: most prefill tokens of a pass that short extensions share.
        block_size: tokens a block.
    """

    max_step_tokens: int
    max_shared_prefill_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One sequence that needs a forward pass.

    Attributes:
        sequence_id: whose.
        order: when the sequence was opened, in increasing numbers.
        last_step: the pass that served it last.
        num_chain: committed tokens to compute.
        num_nodes: tree nodes to compute with the end of the chain.
        num_positions: positions its cache blocks must hold before the extension.
        num_resident: tree nodes already cached behind them.
        num_held_blocks: blocks it has.
        num_shared_blocks: blocks in the way of writing that it must copy first.
    """

    sequence_id: str
    order: int
    last_step: int
    num_chain: int
    num_nodes: int
    num_positions: int
    num_resident: int
    num_held_blocks: int
    num_shared_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole extension."""
        return self.num_chain + self.num_nodes

    def count_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return the blocks that computing ``num_tokens`` of it takes from the pool."""
        needed = -(-(self.num_positions + self.num_resident + num_tokens) // block_size)
        return max(0, needed - self.num_held_blocks) + self.num_shared_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """One sequence's share of the pass.

    Attributes:
        sequence_id: whose.
        num_chain: chain tokens computed now.
        is_whole: the whole extension, nodes included; otherwise a chunk of the chain.
    """

    sequence_id: str
    num_chain: int
    is_whole: bool


def plan_step(
    candidates: Sequence[Candidate], *, num_free_blocks: int, limits: SchedulerLimits
) -> tuple[Grant, ...]:
    """Return the shares of the next pass; empty when nobody's blocks fit.

    Neither the token budget nor the free blocks are exceeded.
    """
    short_limit = limits.max_shared_prefill_tokens
    short = [c for c in candidates if c.num_tokens <= short_limit]
    long = [c for c in candidates if c.num_tokens > short_limit]
    budget = _Budget(limits.max_step_tokens, num_free_blocks, limits.block_size)
    in_turn = sorted(short, key=lambda c: (c.last_step, c.order))
    grants = [_grant_whole(c) for c in in_turn if budget.take(c, c.num_tokens)]
    prefill_left = limits.max_shared_prefill_tokens if grants else limits.max_step_tokens
    for candidate in sorted(long, key=lambda c: c.order):
        grant = _grant_chunk(candidate, min(prefill_left, budget.num_tokens), budget)
        if grant is not None:
            grants.append(grant)
            prefill_left -= grant.num_chain
    return tuple(grants)


class _Budget:
    """Tokens and blocks that are left for the pass."""

    def __init__(self, num_tokens: int, num_blocks: int, block_size: int) -> None:
        self.num_tokens = num_tokens
        self._num_blocks = num_blocks
        self._block_size = block_size

    def take(self, candidate: Candidate, num_tokens: int) -> bool:
        """Take tokens and the blocks they need; false and untouched when it does not fit."""
        num_blocks = candidate.count_blocks(num_tokens, self._block_size)
        if num_tokens > self.num_tokens or num_blocks > self._num_blocks:
            return False
        self.num_tokens -= num_tokens
        self._num_blocks -= num_blocks
        return True


def _grant_whole(candidate: Candidate) -> Grant:
    return Grant(sequence_id=candidate.sequence_id, num_chain=candidate.num_chain, is_whole=True)


def _grant_chunk(candidate: Candidate, num_tokens: int, budget: _Budget) -> Grant | None:
    """Return a share of at most ``num_tokens`` tokens.

    The chain's last token is computed together with the nodes: both give logits.
    """
    is_whole = candidate.num_tokens <= num_tokens
    chunk = candidate.num_chain if is_whole else min(candidate.num_chain - 1, num_tokens)
    if not is_whole and chunk <= 0:
        return None
    if not budget.take(candidate, candidate.num_tokens if is_whole else chunk):
        return None
    return Grant(sequence_id=candidate.sequence_id, num_chain=chunk, is_whole=is_whole)
