"""Which rank is named when several are lost, in the order of cause and consequence."""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from specrag_inference.parallel.messages import RankPlace
from specrag_inference.parallel.watch import Follower, RankLostError, RankWatch, describe_loss

from tests.inference.parallel.rank_bodies import end_by_signal, end_with_code_7, fail, stay

Body = Callable[[Connection], None]
Watch = Callable[..., tuple[RankWatch, "queue.SimpleQueue[str]"]]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """Start a watch over one process for each body."""
    started: list[tuple[RankWatch, list[Follower]]] = []

    def start(*bodies: Body) -> tuple[RankWatch, queue.SimpleQueue[str]]:
        followers = [spawn(body, rank, size=len(bodies) + 1) for rank, body in enumerate(bodies, 1)]
        reasons: queue.SimpleQueue[str] = queue.SimpleQueue()
        one = RankWatch(followers, reasons.put)
        one.start()
        started.append((one, followers))
        return one, reasons

    yield start
    for one, followers in started:
        one.stop()
        for follower in followers:
            follower.process.kill()
            follower.process.join()


def spawn(body: Body, rank: int, *, size: int) -> Follower:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=body, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    place = RankPlace(rank=rank, size=size, init_method="file:///nowhere", local_rank=rank)
    return Follower(place=place, process=process, connection=ours)


def test_all_ranks_ready_lets_the_leader_go_on(watch: Watch) -> None:
    one, reasons = watch(stay, stay)
    one.wait_ready()
    assert not one.lost.is_set()
    assert reasons.empty()


def test_rank_that_ends_by_itself_is_named_with_its_code(watch: Watch) -> None:
    one, reasons = watch(stay, end_with_code_7)
    assert reasons.get(timeout=10) == one.reason == "rank 2 of 3 ended with exit code 7"


def test_killed_rank_is_the_cause_of_what_others_report() -> None:
    failed, killed = spawn(fail, 1, size=3), spawn(end_by_signal, 2, size=3)
    try:
        killed.process.join(30)
        failed.failure = "RuntimeError: Connection closed by peer"
        assert describe_loss([failed, killed]) == "rank 2 of 3 was killed by SIGKILL"
    finally:
        failed.process.kill()
        failed.process.join()


def test_leader_that_waits_for_a_lost_rank_is_told(watch: Watch) -> None:
    one, _ = watch(stay, fail)
    with pytest.raises(RankLostError, match="rank 2 of 3 failed: RuntimeError: peer is gone"):
        one.wait_ready()


def test_loss_ends_the_ranks_that_are_left(watch: Watch) -> None:
    one, reasons = watch(stay, fail)
    assert reasons.get(timeout=10) == "rank 2 of 3 failed: RuntimeError: peer is gone"
    for follower in one.followers:
        follower.process.join(5)
        assert follower.process.exitcode is not None
