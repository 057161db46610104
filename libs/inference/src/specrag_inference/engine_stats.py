"""What an engine says of itself: queues, cache, what its passes are made of. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class WorkKind(StrEnum):
    """What tokens of a pass are computed for."""

    PREFILL = "prefill"
    """Committed tokens whose logits nobody reads: prompts, and what was lost to preemption."""
    TREE = "tree"
    """A token tree under verification and the committed tokens it hangs on."""
    DECODE = "decode"
    """A target decoding alone."""
    SCORE = "score"
    """Nodes of a tree whose log-probs are asked for."""
    DRAFT = "draft"
    """A draft sequence taking in what was committed, and its growing branches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchComposition:
    """What all passes since the start were made of; two snapshots subtract.

    Attributes:
        num_passes: forward passes.
        num_shares: sequences served, summed over passes.
        num_tokens: tokens computed, by kind.
    """

    num_passes: int
    num_shares: int
    num_tokens: Mapping[WorkKind, int]

    @property
    def mean_pass_tokens(self) -> float:
        """Mean tokens of a pass; 0 before the first."""
        return sum(self.num_tokens.values()) / max(1, self.num_passes)

    def __sub__(self, earlier: BatchComposition) -> BatchComposition:
        """Return what was done between two snapshots."""
        return BatchComposition(
            num_passes=self.num_passes - earlier.num_passes,
            num_shares=self.num_shares - earlier.num_shares,
            num_tokens={
                kind: count - earlier.num_tokens[kind] for kind, count in self.num_tokens.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot for health, metrics and leak checks. Counts are since the start.

    Attributes:
        num_running: open sequences, idle ones included.
        num_waiting: sequences not yet admitted.
        num_pending_jobs: commands to open sequences that are not done.
        num_blocks: cache blocks.
        num_free_blocks: blocks no sequence holds, cached prefixes included.
        num_cached_blocks: free blocks that hold a prefix which can be taken up.
        num_preemptions: how often a sequence lost its blocks to another.
        num_prefix_tokens: prompt tokens looked up in the prefix cache.
        num_prefix_hit_tokens: those found.
        oldest_wait_s: how long the sequence that has waited longest, to be admitted or for a share
            of a pass, has done so; 0 when none waits.
        batches: what the passes were made of.
    """

    num_running: int
    num_waiting: int
    num_pending_jobs: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_prefix_tokens: int
    num_prefix_hit_tokens: int
    oldest_wait_s: float
    batches: BatchComposition

    @property
    def num_used_blocks(self) -> int:
        """Blocks that sequences hold."""
        return self.num_blocks - self.num_free_blocks


class PassTally:
    """Counts what passes are made of."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._num_shares = 0
        self._num_tokens = dict.fromkeys(WorkKind, 0)

    def begin_pass(self) -> None:
        """Count a pass."""
        self._num_passes += 1

    def add_share(self, kind: WorkKind, num_tokens: int) -> None:
        """Count one sequence's share of the current pass."""
        self._num_shares += 1
        self._num_tokens[kind] += num_tokens

    def snapshot(self) -> BatchComposition:
        """Return the counts so far."""
        return BatchComposition(
            num_passes=self._num_passes,
            num_shares=self._num_shares,
            num_tokens=dict(self._num_tokens),
        )
