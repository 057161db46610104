"""Verifying a token tree, then decoding alone for a while."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.token_tree import ROOT, TokenTree

from specrag_inference.attention.masks import check_parents, compute_ancestor_mask, compute_depths
from specrag_inference.attention.step import TreePart
from specrag_inference.engine_stats import WorkKind
from specrag_inference.jobs.job import Extension
from specrag_inference.messages import RoundVerified, VerifiedToken
from specrag_inference.sampling.processors import softmax
from specrag_inference.sampling.top_tokens import compute_logprob, list_top_tokens
from specrag_inference.verification import walk_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from specrag_inference.jobs.job import ExtensionLogits, JobLimits
    from specrag_inference.messages import EngineEvent, VerifyTree
    from specrag_inference.sequence import SequenceState
    from specrag_inference.verification import WalkResult


class VerifyJob:
    """One round: a tree (perhaps empty), then up to ``free_run_tokens`` plain decode steps."""

    def __init__(
        self,
        sequence: SequenceState,
        command: VerifyTree,
        limits: JobLimits,
    ) -> None:
        self._sequence = sequence
        self._command = command
        self._limits = limits
        self._passes_left = 1 + command.free_run_tokens
        self._tree = TokenTree.empty()
        self._original_idx: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._part: TreePart | None = None

    @property
    def sequence(self) -> SequenceState:
        """See :class:`~specrag_inference.jobs.job.Job`."""
        return self._sequence

    def start(self) -> None:
        """Check the tree and cut what the context has no room for."""
        if self._sequence.finished:
            raise ValueError(
                f"the answer of '{self._sequence.sequence_id}' has ended after "
                f"{self._sequence.num_answer_tokens} tokens; free the sequence"
            )
        tree = self._command.tree
        check_parents(tree.parent_idx)
        self._limits.check_num_nodes(tree.num_nodes)
        self._limits.check_token_ids(tree.token_ids.tolist(), "the tree")
        self._sequence.drop_scratch()
        self._set_tree(tree)

    def next_extension(self) -> Extension | None:
        """Return the pending tokens with the tree, then one token a free-run step."""
        if self._passes_left == 0:
            return None
        return Extension(
            num_chain=self._sequence.num_pending,
            node_token_ids=self._tree.token_ids.tolist(),
            tree=self._part,
            kind=WorkKind.DECODE if self._part is None else WorkKind.TREE,
        )

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterable[EngineEvent]:
        """Walk the tree, commit what it decides, report the round."""
        sequence = self._sequence
        laws = _LazyLaws(logits, sequence)
        result = walk_tree(
            self._tree,
            laws,
            mode=sequence.mode,
            random=sequence.random,
            position=sequence.num_answer_tokens,
            stop_token_ids=sequence.sampling.stop_token_ids,
            distrusted_drafters=sequence.distrusted_drafters,
        )
        sequence.distrusted_drafters.update(result.violating_drafters)
        yield replace(self._commit(result, laws, forward_s), load=logits.load)
        self._set_tree(TokenTree.empty())

    def finish(self, *, elapsed_s: float) -> Iterable[EngineEvent]:  # noqa: ARG002 - part of the seam
        """The last pass has reported the end already."""
        return ()

    def _commit(self, result: WalkResult, laws: _LazyLaws, forward_s: float) -> RoundVerified:
        sequence = self._sequence
        tokens = self._list_tokens(result)
        decision = sequence.ends.advance([token.token_id for token in tokens])
        tokens = tokens[: decision.num_kept]
        if sequence.sampling.num_top_logprobs is not None:
            tokens = laws.report(tokens, result.path)
        sequence.commit(list(result.path[: len(tokens)]), [token.token_id for token in tokens])
        sequence.finished = decision.finish_reason is not None
        self._passes_left = 0 if sequence.finished else self._passes_left - 1
        return RoundVerified(
            sequence_id=sequence.sequence_id,
            round=self._command.round,
            tokens=tuple(tokens),
            num_draft_tokens=len(self._tree.proposals),
            finish_reason=decision.finish_reason,
            stop_text_length=decision.stop_text_length,
            forward_s=forward_s,
            last=self._passes_left == 0,
        )

    def _list_tokens(self, result: WalkResult) -> list[VerifiedToken]:
        """Return accepted and final tokens, nodes numbered as in the command."""
        tokens = [
            VerifiedToken(
                token_id=int(self._tree.token_ids[node_idx]),
                logprob=logprob,
                node_idx=int(self._original_idx[node_idx]),
            )
            for node_idx, logprob in zip(result.path, result.logprobs, strict=False)
        ]
        if result.final_token is not None:
            final = VerifiedToken(
                token_id=result.final_token,
                logprob=result.logprobs[-1],
                node_idx=None,
                is_bonus=result.is_bonus,
            )
            tokens.append(final)
        return tokens

    def _set_tree(self, tree: TokenTree) -> None:
        """Take the tree for the next pass, without nodes too deep for the context.

        The cut looks at depths only, never at tokens, so the law is unharmed. A node of depth d is
        followed by a token at position ``len(token_ids) + d``, which must exist.
        """
        if tree.num_nodes == 0:
            self._tree, self._part = tree, None
            return
        mask = compute_ancestor_mask(tree.parent_idx)
        depths = compute_depths(mask)
        max_depth = self._limits.max_model_len - 1 - len(self._sequence.token_ids)
        kept = np.flatnonzero(depths <= max_depth)
        self._original_idx = kept
        self._tree = cut_tree(tree, kept)
        self._part = (
            TreePart(depths=depths[kept], rows=mask[np.ix_(kept, kept)]) if kept.size else None
        )


def cut_tree(tree: TokenTree, kept: NDArray[np.int64]) -> TokenTree:
    """Return the tree with only the ``kept`` nodes (ascending, closed under parents)."""
    if len(kept) == tree.num_nodes:
        return tree
    renumbered = np.full(tree.num_nodes + 1, ROOT, dtype=np.int32)
    renumbered[kept] = np.arange(len(kept), dtype=np.int32)
    return TokenTree(
        token_ids=tree.token_ids[kept],
        parent_idx=renumbered[tree.parent_idx[kept]],
        proposals=tuple(
            replace(proposal, node_idx=int(renumbered[proposal.node_idx]))
            for proposal in tree.proposals
            if renumbered[proposal.node_idx] != ROOT
        ),
    )


class _LazyLaws:
    """The target's laws, made only at nodes the walk visits."""

    def __init__(self, logits: ExtensionLogits, sequence: SequenceState) -> None:
        self._logits = logits
        self._laws = sequence.laws
        self._num_top = sequence.sampling.num_top_logprobs
        self._reported: dict[int, NDArray[np.float32]] = {}

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.float32]:
        """See :class:`~specrag_inference.verification.TargetLaws`."""
        row = self._logits.at_root() if node_idx == ROOT else self._logits.at_node(node_idx)
        chain = self._laws.chain
        adjusted = chain.adjust(row, self._laws.get_history(path))
        law = chain.compute_law_of(adjusted)
        if self._num_top is not None:
            self._reported[node_idx] = softmax(adjusted) if chain.is_greedy else law
        return law

    def report(self, tokens: Sequence[VerifiedToken], path: Sequence[int]) -> list[VerifiedToken]:
        """Return the tokens with the log-probabilities that were asked for.

        Args:
            tokens: those on the path, then perhaps the final one.
            path: accepted nodes; the law of each token was made at the node before it.
        """
        assert self._num_top is not None, "somebody asked"
        reported = []
        for token, node_idx in zip(tokens, (ROOT, *path), strict=False):
            law = self._reported[node_idx]
            reported.append(
                replace(
                    token,
                    logprob=compute_logprob(law[token.token_id]),
                    top_logprobs=list_top_tokens(law, self._num_top),
                )
            )
        return reported
