"""The production entry: choose the rule, walk the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.token_tree import ROOT

from specrag_inference.verification.block import BlockRule
from specrag_inference.verification.chooser import Chooser, CounterChooser
from specrag_inference.verification.coupled import CoupledRule
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions, WalkResult
from specrag_inference.verification.traversal import TraversalRule

if TYPE_CHECKING:
    from collections.abc import Collection

    from specrag_common.speculation.randomness import RandomStream
    from specrag_common.speculation.token_tree import TokenTree

    from specrag_inference.verification.laws import TargetLaws

__all__ = ["WalkResult", "choose_rule", "walk_tree"]


def walk_tree(
    tree: TokenTree,
    laws: TargetLaws,
    *,
    mode: VerificationMode,
    random: RandomStream,
    position: int,
    stop_token_ids: Collection[int] = frozenset(),
    distrusted_drafters: Collection[int] = frozenset(),
) -> WalkResult:
    """Verify a tree of proposals; an empty tree decodes one token.

    Args:
        tree: the merged proposals.
        laws: the target's processed laws, asked for at visited nodes only.
        mode: REJECTION or COUPLED.
        random: the sequence's random numbers.
        position: number of answer tokens committed before this round.
        stop_token_ids: an accepted one ends the walk: no final token is drawn behind it.
        distrusted_drafters: drafters with a support violation in an earlier round of this answer.

    Returns:
        Accepted path and final token. Stop strings and length caps are not looked at here: the
        caller cuts the tokens with :class:`~specrag_inference.ends.AnswerEnds`.

    Raises:
        NumericsError: a visited law, the target's or a stated one, has a NaN or an infinity.
    """
    options = WalkOptions(
        position=position,
        stop_token_ids=stop_token_ids,
        distrusted_drafters=distrusted_drafters,
    )
    rule: VerificationRule = (
        CoupledRule(random)
        if mode is VerificationMode.COUPLED
        else choose_rule(tree, CounterChooser(random), options)
    )
    return rule.walk(tree, laws, options)


def choose_rule(tree: TokenTree, chooser: Chooser, options: WalkOptions) -> VerificationRule:
    """Return the rule of REJECTION mode for what the drafters declared.

    Read is who proposes how many branches, and whether their first tokens were drawn; never a token
    or the merged shape, which depends on tokens: two branches that happen to agree are still two.
    Where nothing was drawn, or a drafter is not trusted, proposals are tried node by node.
    """
    roots = [one for one in tree.proposals if tree.parent_idx[one.node_idx] == ROOT]
    is_sampled = any(proposal.law is not None for proposal in roots)
    drafters = {proposal.drafter_index for proposal in tree.proposals}
    if not is_sampled or not drafters.isdisjoint(options.distrusted_drafters):
        return RejectionRule(chooser)
    if len(roots) == 1 and _is_one_chain(tree):
        return BlockRule(chooser)
    return TraversalRule(chooser)


def _is_one_chain(tree: TokenTree) -> bool:
    """Return whether a tree declared as one branch is one; from outside anything may come."""
    return len(tree.proposals) == tree.num_nodes and np.array_equal(
        tree.parent_idx, np.arange(-1, tree.num_nodes - 1)
    )
