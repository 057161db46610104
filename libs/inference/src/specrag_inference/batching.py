"""Lays the granted extensions of several sequences out in one row of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specrag_inference.attention.step import Segment, StepInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from specrag_inference.jobs.job import Extension
    from specrag_inference.scheduler import Grant
    from specrag_inference.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One sequence's share of a pass.

    Attributes:
        sequence: whose tokens.
        extension: what is computed: all that was asked for, or the granted part of it.
    """

    sequence: SequenceState
    extension: Extension

    @property
    def num_logit_rows(self) -> int:
        """Rows of logits the part asks for."""
        if not self.extension.wants_logits:
            return 0
        return min(self.extension.num_chain, 1) + len(self.extension.node_token_ids)


def cut_part(sequence: SequenceState, extension: Extension | None, grant: Grant) -> Part:
    """Return what is granted of the extension that was asked for."""
    assert extension is not None, "somebody asked"
    if grant.ends_chain:
        return Part(sequence=sequence, extension=extension.cut_nodes(grant.num_nodes))
    return Part(sequence=sequence, extension=extension.cut_chain(grant.num_chain))


def build_step(parts: Sequence[Part]) -> StepInputs:
    """Reserve the blocks of all parts and return the arrays of the pass.

    Raises:
        OutOfBlocksError: the pool has fewer free blocks than the parts need.
    """
    token_ids: list[int] = []
    positions: list[NDArray[np.int32]] = []
    slots: list[NDArray[np.int64]] = []
    logit_rows: list[int] = []
    segments = []
    for part in parts:
        segment = _build_segment(part)
        segments.append(segment)
        extension, table = part.extension, part.sequence.table
        first = table.num_tokens
        start = len(token_ids)
        token_ids += part.sequence.token_ids[first : first + extension.num_chain]
        token_ids += extension.node_token_ids
        positions.append(segment.compute_query_positions())
        slots.append(table.slots(segment.num_keys - segment.num_queries, segment.num_keys))
        stop = start + segment.num_queries
        logit_rows += range(stop - part.num_logit_rows, stop)
    return StepInputs(
        token_ids=np.asarray(token_ids, dtype=np.int64),
        position_ids=np.concatenate(positions, dtype=np.int64),
        slot_ids=np.concatenate(slots),
        logit_rows=np.asarray(logit_rows, dtype=np.int64),
        segments=tuple(segments),
    )


def _build_segment(part: Part) -> Segment:
    extension, table = part.extension, part.sequence.table
    num_nodes = 0 if extension.tree is None else len(extension.tree.depths)
    num_keys = table.num_tokens + extension.num_chain + num_nodes
    table.reserve(num_keys)
    return Segment(
        num_cached=table.num_tokens,
        num_chain=extension.num_chain,
        tree=extension.tree,
        slot_runs=tuple(table.slot_runs(num_keys)),
    )
