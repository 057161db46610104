"""The seam between what a sequence is doing and the forward passes it needs for it.

The core's one primitive: *extend a sequence by a chain of committed tokens and a token tree, and
give the logits at the chain's last token and at every node.* A job says which extension it needs
next, gets the logits, and says again, until it needs none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from specrag_common.speculation.token_tree import ROOT

from specrag_inference.attention.step import TreePart
from specrag_inference.engine_stats import WorkKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from specrag_inference.messages import EngineEvent, PassLoad
    from specrag_inference.runner import LogitRows
    from specrag_inference.sequence import SequenceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One request for a forward pass.

    Attributes:
        num_chain: pending committed tokens to compute, from the first pending one.
        node_token_ids: tokens of the tree nodes to compute.
        tree: their place in the tree; ``None`` without nodes.
        wants_logits: whether logits are needed at all.
        nodes_can_wait: any leading part of the nodes may be computed alone; the job is then asked
            for its next extension.
        kind: what the pass's statistics count it as.
    """

    num_chain: int
    node_token_ids: Sequence[int] = ()
    tree: TreePart | None = None
    wants_logits: bool = True
    nodes_can_wait: bool = False
    kind: WorkKind = WorkKind.PREFILL

    def cut_chain(self, num_chain: int) -> Extension:
        """Return a chunk that stays before the chain's end and gives no logits."""
        assert num_chain < self.num_chain, "a chunk leaves the chain's end for the nodes"
        return Extension(num_chain=num_chain, wants_logits=False)

    def cut_nodes(self, num_nodes: int) -> Extension:
        """Return the whole chain with only the first ``num_nodes`` of the nodes."""
        if num_nodes == len(self.node_token_ids):
            return self
        assert self.tree is not None, "there are nodes to leave out"
        num_all = len(self.tree.depths) - len(self.node_token_ids) + num_nodes
        return replace(
            self,
            node_token_ids=self.node_token_ids[:num_nodes],
            tree=TreePart(
                depths=self.tree.depths[:num_all], rows=self.tree.rows[:num_nodes, :num_all]
            ),
        )


class ExtensionLogits:
    """The logits of one completed extension.

    Attributes:
        num_nodes: nodes that were computed: all of the extension's, unless they could wait.
        has_root: there was a chain, whose last token's logits are here.
        load: how full the pass was.
    """

    def __init__(
        self, rows: LogitRows, *, first_row: int, num_chain: int, num_nodes: int, load: PassLoad
    ) -> None:
        self.num_nodes = num_nodes
        self.has_root = num_chain > 0
        self.load = load
        self._rows = rows
        self._root_row = first_row
        self._node_row = first_row + min(num_chain, 1)

    def at_root(self) -> NDArray[np.float32]:
        """Return [vocab_size] float32 at the chain's last token."""
        return self._rows.row(self._root_row)

    def at_node(self, new_node_idx: int) -> NDArray[np.float32]:
        """Return [vocab_size] float32 at a node, counted from the first node of the extension."""
        return self._rows.row(self._node_row + new_node_idx)

    def compute_logprobs(
        self, parents: Sequence[int], token_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """Return [num_tokens] raw log-probs of tokens that follow ``ROOT`` or a node each."""
        rows = [self._root_row if node == ROOT else self._node_row + node for node in parents]
        return self._rows.compute_logprobs(rows, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """What every command is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: longest sequence in tokens.
        max_nodes: most tree nodes, those of all drafted branches together included.
    """

    vocab_size: int
    max_model_len: int
    max_nodes: int

    def check_token_ids(self, token_ids: Sequence[int], what: str) -> None:
        """Raise ``ValueError`` when an id is none of the vocabulary's."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            raise ValueError(f"a token id of {what} is outside [0, {self.vocab_size})")

    def check_num_nodes(self, num_nodes: int) -> None:
        """Raise ``ValueError`` when a tree is too large for one pass."""
        if num_nodes > self.max_nodes:
            raise ValueError(f"num_nodes={num_nodes} exceeds max_nodes={self.max_nodes}")


class Job(Protocol):
    """One command being carried out.

    The engine calls :meth:`start` when the sequence's earlier jobs are done, then
    :meth:`next_extension` and :meth:`complete` in turns, then :meth:`finish` once.
    """

    @property
    def sequence(self) -> SequenceState:
        """The sequence it works on."""
        ...

    def start(self) -> None:
        """Bring the sequence into the state the job begins with.

        Raises:
            ValueError: the command does not fit the sequence; the message says why.
        """
        ...

    def next_extension(self) -> Extension | None:
        """Return what has to be computed next, or ``None`` when the job is done."""
        ...

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterable[EngineEvent]:
        """Take the logits of the extension, whose chain now counts as cached.

        All its nodes are computed, or the first ``logits.num_nodes`` when they can wait.

        Raises:
            NumericsError: a needed row has a NaN or an infinity.
        """
        ...

    def finish(self, *, elapsed_s: float) -> Iterable[EngineEvent]:
        """Return the events that end the job; ``elapsed_s`` counts from its command."""
        ...
