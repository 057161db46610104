"""Ending a walk at a node, as the rules that settle a tree upwards do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.verification.chooser import Chooser, TrialKey
from specrag_inference.verification.rules import FinalToken, Step, TreeVisits, compute_logprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.verification.residual import Law, Residual
    from specrag_inference.verification.rules import WalkResult
    from specrag_inference.verification.trials import Trial


class Settling:
    """One walk's decisions where to end.

    Throughout, ``steps`` are the tokens down to a node and ``origin`` is the trial that reached
    it, ``None`` at the root.
    """

    __slots__ = ("_chooser", "visits")

    def __init__(self, chooser: Chooser, visits: TreeVisits) -> None:
        """Bind to a walk and its source of random choices."""
        self._chooser = chooser
        self.visits = visits

    def settle_leaf(
        self, steps: Sequence[Step], weight: float, origin: Trial | None
    ) -> WalkResult | None:
        """Accept a node behind which nothing is proposed with ``weight``, else return ``None``.

        A bonus token follows, but behind a stop token nothing does.
        """
        if not self._accepts(steps, weight, origin):
            return None
        if self.visits.is_stopped(steps):
            return self.visits.finish(steps, None)
        target_probs = self.visits.compute_law(steps)
        return self._finish(steps, target_probs, target_probs, is_bonus=True)

    def settle_inner(
        self, steps: Sequence[Step], target_probs: Law, residual: Residual, origin: Trial | None
    ) -> WalkResult | None:
        """Accept a node with the weight all its failed trials left, else return ``None``."""
        if not self._accepts(steps, residual.weight, origin):
            return None
        return self._finish(steps, target_probs, residual.get_law(), is_bonus=False)

    def _accepts(self, steps: Sequence[Step], weight: float, origin: Trial | None) -> bool:
        if origin is None:
            return True
        depth = len(steps) - 1
        key = TrialKey.settling(origin, position=self.visits.options.position + depth, depth=depth)
        return self._chooser.accept(weight, key)

    def _finish(
        self, steps: Sequence[Step], target_probs: Law, law: Law, *, is_bonus: bool
    ) -> WalkResult:
        token_id = self._chooser.draw(law, position=self.visits.options.position + len(steps))
        final = FinalToken(token_id, compute_logprob(target_probs, token_id))
        return self.visits.finish(steps, final, is_bonus=is_bonus)
