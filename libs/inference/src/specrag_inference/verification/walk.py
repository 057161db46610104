"""The production entry: choose the rule, walk the tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import VerificationMode

from specrag_inference.verification.chooser import CounterChooser
from specrag_inference.verification.coupled import CoupledRule
from specrag_inference.verification.rejection import RejectionRule
from specrag_inference.verification.rules import VerificationRule, WalkOptions, WalkResult

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
    return choose_rule(mode, random).walk(tree, laws, options)


def choose_rule(mode: VerificationMode, random: RandomStream) -> VerificationRule:
    """Return the rule for a mode.

    A rule that only fits some trees may be chosen here from declared kinds and counts, before any
    token is read, never from the merged shape.
    """
    if mode is VerificationMode.COUPLED:
        return CoupledRule(random)
    return RejectionRule(CounterChooser(random))
