"""Runs every pass on all ranks of a replica."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from specrag_inference.parallel.messages import RankStep

if TYPE_CHECKING:
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.parallel.followers import FollowerRanks
    from specrag_inference.runner import LogitRows
    from specrag_inference.step_runner import StepRunner


class ParallelRunner:
    """Rank 0's runner: sends each pass to the followers, then runs its own share.

    Copies are run here at once and travel with the next pass: nothing reads the followers' cache
    before that, and a pass costs one message a rank.
    """

    def __init__(self, local: StepRunner, followers: FollowerRanks) -> None:
        """Lead ``followers``, which hold the other shares of the model that ``local`` runs."""
        self._local = local
        self._followers = followers
        self._copies: list[tuple[SlotIds, SlotIds]] = []

    def execute(self, step: StepInputs) -> LogitRows:
        """See :class:`~specrag_inference.step_runner.StepRunner`.

        Raises:
            RankLostError: a rank is gone, or the ranks could not run the pass together.
        """
        message = RankStep(copies=tuple(self._copies), step=step)
        self._copies.clear()
        try:
            self._followers.send(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
            return self._local.execute(step)
        except Exception as error:
            raise self._followers.explain(error) from error

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """See :class:`~specrag_inference.step_runner.StepRunner`."""
        self._copies.append((source.copy(), destination.copy()))
        self._local.copy_slots(source, destination)
