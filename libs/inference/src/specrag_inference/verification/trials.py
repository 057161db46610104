"""The proposals at one node, in the order they are tried, each with the law it really has.

A law that cannot be what the token was drawn from (the token is outside its support, it does not
sum to 1) is a support violation: the proposal is tried as DETERMINISTIC, which is right for any
token, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.proposals import DraftLaw, SiblingKind

from specrag_inference.sampling.numerics import NumericsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from specrag_common.speculation.token_tree import NodeProposal, TokenTree

_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One proposed token at a node.

    Attributes:
        token_id: the token.
        node_idx: the child node that carries it.
        drafter_index: the drafter.
        branch_idx: draw order of the branch.
        law: the law it was drawn from given the earlier-drawn siblings; ``None`` = one-hot.
        violates_support: the stated law was not believed.
    """

    token_id: int
    node_idx: int
    drafter_index: int
    branch_idx: int
    law: DraftLaw | None
    violates_support: bool = False


def group_by_parent(tree: TokenTree) -> dict[int, list[NodeProposal]]:
    """Return the proposals for the children of each node (and of ``ROOT``) that has any."""
    groups: dict[int, list[NodeProposal]] = {}
    parents = tree.parent_idx.tolist()
    for proposal in tree.proposals:
        groups.setdefault(parents[proposal.node_idx], []).append(proposal)
    return groups


def order_trials(
    tree: TokenTree,
    proposals: Iterable[NodeProposal],
    *,
    distrusted_drafters: Collection[int] = (),
) -> list[Trial]:
    """Return the trials at one node: SAMPLED before DETERMINISTIC, then (drafter, branch).

    Proposals are never merged, but for the one draw that several branches of a drafter's
    without-replacement tree share.

    Args:
        tree: the tree, for the tokens.
        proposals: all proposals for the children of one node.
        distrusted_drafters: their laws are not believed.

    Raises:
        NumericsError: a stated law has a NaN or an infinity.
    """
    drawn: dict[int, list[int]] = {}
    trials = []
    for proposal in sorted(proposals, key=lambda item: (item.drafter_index, item.branch_idx)):
        token_id = int(tree.token_ids[proposal.node_idx])
        earlier: list[int] = []
        if proposal.sibling_kind is SiblingKind.WITHOUT_REPLACEMENT:
            siblings = drawn.setdefault(proposal.drafter_index, [])
            if token_id in siblings:
                continue
            earlier = siblings.copy()
            siblings.append(token_id)
        trusted = proposal.drafter_index not in distrusted_drafters
        trials.append(_build_trial(proposal, token_id, earlier, trusted=trusted))
    return sorted(trials, key=lambda trial: trial.law is None)


def _build_trial(
    proposal: NodeProposal, token_id: int, earlier: list[int], *, trusted: bool
) -> Trial:
    """Return the trial of one proposal, its law checked and conditioned on earlier siblings."""
    law = proposal.law if trusted else None
    violates = False
    if law is not None:
        law = _condition(law, earlier)
        violates = law is None or not _supports(law, token_id)
    return Trial(
        token_id=token_id,
        node_idx=proposal.node_idx,
        drafter_index=proposal.drafter_index,
        branch_idx=proposal.branch_idx,
        law=None if violates else law,
        violates_support=violates,
    )


def _condition(law: DraftLaw, earlier: list[int]) -> DraftLaw | None:
    """Return the law normalised, without ``earlier`` tokens; ``None`` when it is no law."""
    if not np.isfinite(law.probs).all():
        raise NumericsError(f"a draft law of {len(law.probs)} entries has a NaN or an infinity")
    total = float(law.probs.sum(dtype=np.float64))
    if len(law.probs) != len(law.token_ids) or abs(total - 1.0) > _MASS_TOLERANCE:
        return None
    ids = law.token_ids
    if ids[0] < 0 or (ids[1:] <= ids[:-1]).any() or (law.probs < 0).any():
        return None
    probs = law.probs
    if earlier:
        probs = np.where(np.isin(law.token_ids, earlier), 0, probs)
        total = float(probs.sum(dtype=np.float64))
    if total <= 0.0:
        return None
    return DraftLaw(token_ids=law.token_ids, probs=probs / probs.dtype.type(total))


def _supports(law: DraftLaw, token_id: int) -> bool:
    """Return whether the law gives ``token_id`` a positive probability."""
    idx = int(np.searchsorted(law.token_ids, token_id))
    return idx < len(law.token_ids) and law.token_ids[idx] == token_id and law.probs[idx] > 0
