"""The proposals at one node, in the order they are tried, each with the law it really has.

Laws are normalised in float64: a drafter draws with a float64 cumulative sum over the numbers it
ships, scaled by its own end, so these are the probabilities it really draws with.

A law that cannot be what the token was drawn from (the token is outside its support, it does not
sum to 1) is a support violation: the proposal is tried as DETERMINISTIC, which is right for any
token, and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.proposals import SiblingKind

from specrag_inference.sampling.numerics import NumericsError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray
    from specrag_common.speculation.proposals import DraftLaw, TokenIds
    from specrag_common.speculation.token_tree import NodeProposal, TokenTree

_MASS_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialLaw:
    """What a token on trial was drawn from.

    Attributes:
        token_ids: [support_size] distinct, ascending.
        probs: [support_size] float64, non-negative, sums to 1.
    """

    token_ids: TokenIds
    probs: NDArray[np.float64]

    @staticmethod
    def one_hot(token_id: int) -> TrialLaw:
        """Return the law of a token that could be no other."""
        return TrialLaw(token_ids=np.array([token_id], dtype=np.int32), probs=np.ones(1))

    def get_prob(self, token_id: int) -> float:
        """Return the probability of a token, 0 outside the support."""
        idx = int(np.searchsorted(self.token_ids, token_id))
        if idx == len(self.token_ids) or self.token_ids[idx] != token_id:
            return 0.0
        return float(self.probs[idx])


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One proposed token at a node.

    Attributes:
        token_id: the token.
        node_idx: the child node that carries it.
        drafter_index: the drafter.
        branch_idx: draw order of the branch.
        law: the law it was drawn from given the earlier-drawn siblings, positive at the token;
            one-hot where the proposal is DETERMINISTIC.
        is_sampled: the proposal is SAMPLED and its law is believed.
        violates_support: the stated law was not believed.
    """

    token_id: int
    node_idx: int
    drafter_index: int
    branch_idx: int
    law: TrialLaw
    is_sampled: bool
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
    without-replacement tree share. Only SAMPLED proposals are draws: a DETERMINISTIC sibling takes
    nothing out of the law that the others were drawn from.

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
        if proposal.sibling_kind is SiblingKind.WITHOUT_REPLACEMENT and proposal.law is not None:
            siblings = drawn.setdefault(proposal.drafter_index, [])
            if token_id in siblings:
                continue
            earlier = siblings.copy()
            siblings.append(token_id)
        trusted = proposal.drafter_index not in distrusted_drafters
        trials.append(_build_trial(proposal, token_id, earlier, trusted=trusted))
    return sorted(trials, key=lambda trial: not trial.is_sampled)


def _build_trial(
    proposal: NodeProposal, token_id: int, earlier: list[int], *, trusted: bool
) -> Trial:
    """Return the trial of one proposal, its law checked and conditioned on earlier siblings."""
    stated = proposal.law if trusted else None
    law = None if stated is None else _condition(stated, earlier)
    if law is not None and law.get_prob(token_id) <= 0.0:
        law = None
    return Trial(
        token_id=token_id,
        node_idx=proposal.node_idx,
        drafter_index=proposal.drafter_index,
        branch_idx=proposal.branch_idx,
        law=law or TrialLaw.one_hot(token_id),
        is_sampled=law is not None,
        violates_support=stated is not None and law is None,
    )


def _condition(law: DraftLaw, earlier: list[int]) -> TrialLaw | None:
    """Return the law normalised, without ``earlier`` tokens; ``None`` when it is no law."""
    if not np.isfinite(law.probs).all():
        raise NumericsError(f"a draft law of {len(law.probs)} entries has a NaN or an infinity")
    probs = law.probs.astype(np.float64)
    if len(probs) != len(law.token_ids) or abs(float(probs.sum()) - 1.0) > _MASS_TOLERANCE:
        return None
    ids = law.token_ids
    if ids[0] < 0 or (ids[1:] <= ids[:-1]).any() or (probs < 0).any():
        return None
    if earlier:
        probs[np.isin(ids, earlier)] = 0.0
    total = float(probs.sum())
    return TrialLaw(token_ids=ids, probs=probs / total) if total > 0.0 else None
