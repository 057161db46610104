"""Scoring: the log-prob of every node of a tree given the sequence and the node's ancestors.

A node's log-prob is read at its parent, so leaves are never computed. The others are computed in
preorder. Whatever the cut between two passes, the computed nodes that later ones still see are then
exactly the ancestors of the next node: one path. Only they stay in the cache, as scratch behind the
committed tokens, so that a tree of any size needs room for its longest branch and one pass, and
the masks of a pass are [nodes of the pass, path + nodes of the pass].
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.token_tree import ROOT

from specrag_inference.attention.masks import check_parents, compute_ancestor_mask
from specrag_inference.attention.step import TreePart
from specrag_inference.engine_stats import WorkKind
from specrag_inference.jobs.job import Extension
from specrag_inference.messages import TreeScored
from specrag_inference.sampling.numerics import check_finite

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from specrag_inference.jobs.job import ExtensionLogits, JobLimits
    from specrag_inference.messages import EngineEvent, ScoreTree
    from specrag_inference.sequence import SequenceState


class ScoreJob:
    """One tree to be scored; leaves neither tokens nor cache entries behind."""

    def __init__(self, sequence: SequenceState, command: ScoreTree, limits: JobLimits) -> None:
        self._sequence = sequence
        self._command = command
        self._limits = limits
        self._logprobs = np.full(len(command.token_ids), np.nan, dtype=np.float32)
        self._outline = _Outline.empty()
        self._to_compute: list[int] = []
        self._resident: list[int] = []
        self._is_root_due = False
        self._cache_generation = sequence.cache_generation
        self._num_passes = 0

    @property
    def sequence(self) -> SequenceState:
        """See :class:`~specrag_inference.jobs.job.Job`."""
        return self._sequence

    def start(self) -> None:
        """Check the tree and order its nodes."""
        self._check()
        wanted = self._command.is_wanted
        self._outline = _Outline(
            self._command.parent_idx,
            np.ones(self._logprobs.shape, dtype=np.bool_) if wanted is None else wanted,
        )
        self._check_depth()
        self._sequence.drop_scratch()
        self._cache_generation = self._sequence.cache_generation
        self._to_compute = self._outline.preorder
        self._is_root_due = ROOT in self._outline.readers or bool(self._to_compute)

    def next_extension(self) -> Extension | None:
        """Return the pending tokens with the next nodes in preorder, as many as a pass takes."""
        if self._cache_generation != self._sequence.cache_generation:
            self._start_over()
        if not self._is_root_due and not self._to_compute:
            return None
        nodes = self._to_compute[: self._limits.max_nodes]
        return Extension(
            num_chain=self._sequence.num_pending,
            node_token_ids=[int(self._command.token_ids[node]) for node in nodes],
            tree=self._compute_part(nodes) if nodes else None,
            nodes_can_wait=True,
            kind=WorkKind.SCORE,
        )

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterable[EngineEvent]:  # noqa: ARG002 - part of the seam
        """Read the log-probs of the computed nodes' children; keep the path to what is next."""
        self._num_passes += 1
        nodes = self._to_compute[: logits.num_nodes]
        self._read(nodes, logits)
        self._is_root_due = False
        del self._to_compute[: logits.num_nodes]
        path = self._outline.compute_path(self._to_compute[0]) if self._to_compute else []
        cached = [*self._resident, *nodes]
        kept = set(path)
        self._sequence.table.compact_scratch(
            [offset for offset, node in enumerate(cached) if node in kept]
        )
        self._resident = path
        return ()

    def finish(self, *, elapsed_s: float) -> Iterable[EngineEvent]:
        """Report the log-probs."""
        self._sequence.drop_scratch()
        yield TreeScored(
            sequence_id=self._sequence.sequence_id,
            score_id=self._command.score_id,
            logprobs=self._logprobs,
            num_passes=self._num_passes,
            score_s=elapsed_s,
        )

    def _check(self) -> None:
        command = self._command
        for name, values in (("parent_idx", command.parent_idx), ("is_wanted", command.is_wanted)):
            if values is not None and len(values) != len(command.token_ids):
                raise ValueError(
                    f"{name} has {len(values)} values for num_nodes={len(command.token_ids)}"
                )
        check_parents(command.parent_idx)
        self._limits.check_token_ids(command.token_ids.tolist(), "the tree")

    def _check_depth(self) -> None:
        length = len(self._sequence.token_ids) + self._outline.max_depth
        if length > self._limits.max_model_len:
            raise ValueError(
                f"the deepest branch makes num_tokens={length}, which exceeds "
                f"max_model_len={self._limits.max_model_len}"
            )

    def _start_over(self) -> None:
        """The cache was taken: the path to what is next has to be computed again."""
        self._cache_generation = self._sequence.cache_generation
        self._to_compute = self._resident + self._to_compute
        self._resident = []

    def _compute_part(self, nodes: list[int]) -> TreePart:
        """Return the place of ``nodes`` behind the resident path.

        A node sees the path down to where its own branch leaves it, its ancestors among ``nodes``
        and itself.
        """
        local_idx = {node: offset for offset, node in enumerate(nodes)}
        parents = np.empty(len(nodes), dtype=np.int32)
        num_seen = np.empty(len(nodes), dtype=np.int32)
        for offset, node in enumerate(nodes):
            parent = self._outline.parent_idx[node]
            parents[offset] = local_idx.get(parent, ROOT)
            leaves_path = parents[offset] == ROOT
            num_seen[offset] = (
                self._outline.depths[node] - 1 if leaves_path else num_seen[parents[offset]]
            )
        path_rows = np.arange(len(self._resident)) < num_seen[:, None]
        return TreePart(
            depths=np.asarray(
                [self._outline.depths[node] for node in (*self._resident, *nodes)], dtype=np.int32
            ),
            rows=np.hstack((path_rows, compute_ancestor_mask(parents))),
        )

    def _read(self, nodes: list[int], logits: ExtensionLogits) -> None:
        parents: list[int] = []
        children: list[int] = []
        sources = [(ROOT, ROOT)] if logits.has_root else []
        sources += list(enumerate(nodes))
        for offset, node in sources:
            readers = self._outline.readers.get(node, ())
            parents += [offset] * len(readers)
            children += readers
        found = logits.compute_logprobs(parents, self._command.token_ids[children].tolist())
        check_finite(found, "log-probs of the scored tree")
        self._logprobs[children] = found


class _Outline:
    """The shape of a tree: depths, who is read where, and what has to be computed in what order.

    Attributes:
        parent_idx: the parent of each node.
        depths: 1 for children of the root, one more than the parent's for the rest.
        max_depth: the largest of them; 0 without nodes.
        readers: for ``ROOT`` and every node, the wanted children.
        preorder: the nodes with a wanted node below them, each before its descendants, which
            follow it without a gap.
    """

    def __init__(self, parent_idx: NDArray[np.int32], wanted: NDArray[np.bool_]) -> None:
        self.parent_idx: list[int] = parent_idx.tolist()
        self.depths: list[int] = []
        self.readers: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parent_idx):
            self.depths.append(1 if parent == ROOT else self.depths[parent] + 1)
            if wanted[node]:
                self.readers.setdefault(parent, []).append(node)
        self.max_depth = max(self.depths, default=0)
        self.preorder = self._compute_preorder()

    @staticmethod
    def empty() -> _Outline:
        """Return the outline of the tree without nodes."""
        return _Outline(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.bool_))

    def compute_path(self, node: int) -> list[int]:
        """Return the ancestors of a node from the first level down."""
        path = []
        while (node := self.parent_idx[node]) != ROOT:
            path.append(node)
        return path[::-1]

    def _compute_preorder(self) -> list[int]:
        inner: dict[int, list[int]] = {}
        needed = set(self.readers)
        for node in range(len(self.parent_idx) - 1, -1, -1):
            if node in needed:
                parent = self.parent_idx[node]
                needed.add(parent)
                # Backwards here, so that taking from the end of the stack goes forwards.
                inner.setdefault(parent, []).append(node)
        order: list[int] = []
        stack = list(inner.get(ROOT, ()))
        while stack:
            node = stack.pop()
            order.append(node)
            stack += inner.get(node, ())
        return order
