"""Drafting: ingest what was committed, then grow branches token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import DraftBranch, DraftLaw, DraftSource
from specrag_common.speculation.token_tree import ROOT

from specrag_inference.draft_tree import DraftTree
from specrag_inference.drafting import draw_draft_token
from specrag_inference.engine_stats import WorkKind
from specrag_inference.jobs.job import Extension
from specrag_inference.messages import TokensProposed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from specrag_inference.drafting import DrawnToken
    from specrag_inference.jobs.job import ExtensionLogits, JobLimits
    from specrag_inference.messages import EngineEvent, ProposeTokens
    from specrag_inference.sequence import SequenceState


@dataclass(slots=True)
class _GrowingBranch:
    """One branch: its draws so far and the tree node of the last one."""

    token_ids: list[int] = field(default_factory=list)
    laws: list[DraftLaw | None] = field(default_factory=list)
    tip: int = ROOT

    def append(self, drawn: DrawnToken, node_idx: int) -> None:
        self.token_ids.append(drawn.token_id)
        self.laws.append(drawn.law)
        self.tip = node_idx


class ProposeJob:
    """One round of drafting: ``gamma`` passes, each extending every branch by one token.

    The first pass ingests the committed tokens as a chain; the following ones compute the nodes
    drawn last. The tokens drawn in the last pass are never computed here: if they are committed,
    the next round ingests them.
    """

    def __init__(
        self,
        sequence: SequenceState,
        command: ProposeTokens,
        limits: JobLimits,
    ) -> None:
        self._sequence = sequence
        self._command = command
        self._limits = limits
        self._passes_left = 0
        self._is_abandoned = False
        self._tree = DraftTree()
        self._branches: list[_GrowingBranch] = []

    @property
    def sequence(self) -> SequenceState:
        """See :class:`~specrag_inference.jobs.job.Job`."""
        return self._sequence

    def start(self) -> None:
        """Commit, keeping the drafted nodes that turned out right in the cache."""
        sequence = self._sequence
        committed = list(self._command.committed_token_ids)
        self._limits.check_token_ids(committed, "committed_token_ids")
        self._limits.check_num_nodes(self._command.gamma * self._command.num_branches)
        max_model_len = self._limits.max_model_len
        room = max_model_len - len(sequence.token_ids) - len(committed)
        if room < 0:
            raise ValueError(
                f"num_tokens={max_model_len - room} exceeds max_model_len={max_model_len}"
            )
        # The last committed token stays pending: only computing it gives logits to draft from.
        path = [] if sequence.draft_tree is None else sequence.draft_tree.match(committed[:-1])
        sequence.draft_tree = None
        sequence.commit(path, committed)
        sequence.drop_scratch()
        self._passes_left = 0 if self._is_abandoned else min(self._command.gamma, room)
        if self._passes_left:
            sequence.draft_tree = self._tree
            self._branches = [_GrowingBranch() for _ in range(self._command.num_branches)]

    def abandon(self) -> None:
        """Stop drafting, commit nonetheless: a later command made this round stale."""
        self._is_abandoned = True
        self._passes_left = 0

    def next_extension(self) -> Extension | None:
        """Return pending tokens and the nodes drawn last, or what is left to ingest."""
        if self._passes_left == 0:
            missing = self._sequence.num_pending - 1
            if missing <= 0:
                return None
            return Extension(num_chain=missing, wants_logits=False, kind=WorkKind.DRAFT)
        tree = self._tree
        fresh = tree.token_ids[tree.num_resident :]
        return Extension(
            num_chain=self._sequence.num_pending,
            node_token_ids=fresh,
            tree=tree.compute_part() if tree.token_ids else None,
            kind=WorkKind.DRAFT,
        )

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterable[EngineEvent]:  # noqa: ARG002 - part of the seam
        """Draw one more token for every branch that has not stopped."""
        if self._passes_left == 0:
            return ()
        first_node = self._tree.num_resident
        self._tree.num_resident = len(self._tree.token_ids)
        taken: dict[int, int] = {}
        for branch_idx, branch in enumerate(self._branches):
            if not self._has_stopped(branch):
                rank = taken[branch.tip] = taken.get(branch.tip, -1) + 1
                row = (
                    logits.at_root()
                    if branch.tip == ROOT
                    else logits.at_node(branch.tip - first_node)
                )
                drawn = self._draw(row, branch_idx, rank)
                branch.append(drawn, self._tree.add(branch.tip, drawn.token_id))
        self._passes_left -= 1
        if all(self._has_stopped(branch) for branch in self._branches):
            self._passes_left = 0
        return ()

    def finish(self, *, elapsed_s: float) -> Iterable[EngineEvent]:
        """Report the branches in draw order."""
        yield TokensProposed(
            sequence_id=self._sequence.sequence_id,
            round=self._command.round,
            branches=tuple(
                DraftBranch(
                    token_ids=tuple(branch.token_ids),
                    laws=tuple(branch.laws),
                    source=DraftSource.MODEL,
                )
                for branch in self._branches
                if branch.token_ids
            ),
            draft_s=elapsed_s,
        )

    def _has_stopped(self, branch: _GrowingBranch) -> bool:
        """Whether the branch's own last token ends an answer."""
        return bool(branch.token_ids) and (
            branch.token_ids[-1] in self._sequence.sampling.stop_token_ids
        )

    def _draw(self, row: NDArray[np.float32], branch_idx: int, rank: int) -> DrawnToken:
        sequence = self._sequence
        return draw_draft_token(
            row,
            sequence.laws.chain,
            history=sequence.laws.get_history(self._branches[branch_idx].token_ids),
            mode=sequence.mode,
            random=sequence.random,
            drafter_index=sequence.drafter_index,
            branch_idx=branch_idx,
            rank=rank,
        )
