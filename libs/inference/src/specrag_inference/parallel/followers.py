"""The other ranks of a replica, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specrag_inference.parallel.follower import run_follower
from specrag_inference.parallel.messages import RankPlace, RankStart
from specrag_inference.parallel.watch import Follower, RankLostError, RankWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_inference.plan import EnginePlan

_EXPLANATION_WAIT_S: Final = 3.0
"""A collective that fails is noticed sooner than the end of the process that caused it."""

_END_WAIT_S: Final = 2.0


class FollowerRanks:
    """Starts ranks 1 … ``tp_size`` - 1 as processes of their own, feeds and watches them.

    Passes travel over one pipe a rank, not over a collective: a rank that waits for work sleeps in
    the kernel for as long as it takes, and an end of the leader ends the wait.
    """

    def __init__(self, plan: EnginePlan, *, on_loss: Callable[[str], None]) -> None:
        """Start the processes; ``on_loss`` gets a reason, in a thread, when one is lost."""
        self._meeting_folder = Path(tempfile.mkdtemp(prefix="specrag-ranks-"))
        init_method = (self._meeting_folder / "store").as_uri()
        self.place = RankPlace(rank=0, size=plan.tp_size, init_method=init_method, local_rank=0)
        self._followers = [
            _spawn(
                RankPlace(rank=r, size=plan.tp_size, init_method=init_method, local_rank=r), plan
            )
            for r in range(1, plan.tp_size)
        ]
        self._watch = RankWatch(self._followers, on_loss)
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """Process ids, in the order of ranks, rank 0 not among them."""
        return [follower.process.pid or 0 for follower in self._followers]

    def wait_ready(self) -> None:
        """Return once every follower has loaded its share.

        Raises:
            RankLostError: one of them could not.
        """
        self._watch.wait_ready()
        shutil.rmtree(self._meeting_folder, ignore_errors=True)

    def send(self, payload: bytes) -> None:
        """Send a pickled message to every follower.

        Raises:
            OSError: one of them is gone.
        """
        for follower in self._followers:
            follower.connection.send_bytes(payload)

    def explain(self, error: Exception) -> RankLostError:
        """Return why a pass failed here with ``error``: most often another rank was lost."""
        if self._watch.lost.wait(_EXPLANATION_WAIT_S):
            return RankLostError(self._watch.reason)
        return RankLostError(f"{self.place} failed: {type(error).__name__}: {error}")

    def close(self) -> None:
        """End the processes, by force if they do not follow. Never raises."""
        self._watch.stop()
        for follower in self._followers:
            with contextlib.suppress(OSError):
                follower.connection.close()
        for follower in self._followers:
            follower.process.join(_END_WAIT_S)
            if follower.process.exitcode is None:
                follower.process.kill()
                follower.process.join()
        shutil.rmtree(self._meeting_folder, ignore_errors=True)


def _spawn(place: RankPlace, plan: EnginePlan) -> Follower:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=run_follower,
        args=(theirs, RankStart(place=place, plan=plan)),
        name=f"rank-{place.rank}",
        daemon=True,
    )
    process.start()
    theirs.close()
    return Follower(place=place, process=process, connection=ours)
