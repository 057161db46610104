"""Which drafters take part; more of it is shown end to end."""

from __future__ import annotations

import hashlib

import pytest
from specrag.v1 import common_pb2
from specrag_common.runtime.errors import FailedPrecondition, UpstreamUnavailable
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_orchestrator.answering.decoding import derive_draft_key
from specrag_orchestrator.answering.plan import (
    DraftPlan,
    find_gone_drafters,
    no_drafters_error,
    plan_drafters,
)
from specrag_orchestrator.question import DraftOptions


class KnownDrafter:
    """A drafter whose handshake is over."""

    def __init__(self, index: int, *, fingerprint: str = "f", is_up: bool = True) -> None:
        self.index = index
        self.name = f"drafter-{index}"
        self.is_usable = is_up
        self.problem = "" if is_up else "connection refused"
        self.info: common_pb2.ModelInfo | None = common_pb2.ModelInfo(
            tokenizer_fingerprint=fingerprint, capabilities=[common_pb2.CAPABILITY_DRAFT_SUFFIX]
        )


def plan(
    drafters: list[KnownDrafter], *, num_passages: int = 8, options: DraftOptions | None = None
) -> DraftPlan[KnownDrafter]:
    return plan_drafters(
        drafters, options or DraftOptions(), fingerprint="f", num_passages=num_passages
    )


def indices(found: DraftPlan[KnownDrafter]) -> list[int]:
    return [one.index for one in found.drafters]


def test_all_usable_drafters_take_part() -> None:
    found = plan([KnownDrafter(0), KnownDrafter(1)])
    assert (indices(found), found.degraded) == ([0, 1], ())


@pytest.mark.parametrize(("num_passages", "expected"), [(0, [0]), (1, [0]), (2, [0, 1])])
def test_there_is_at_most_one_drafter_a_passage(num_passages: int, expected: list[int]) -> None:
    drafters = [KnownDrafter(index) for index in range(3)]
    assert indices(plan(drafters, num_passages=num_passages)) == expected


def test_drafter_that_is_down_is_replaced_and_not_named_when_enough_are_left() -> None:
    drafters = [KnownDrafter(0, is_up=False), KnownDrafter(1), KnownDrafter(2)]
    found = plan(drafters, options=DraftOptions(num_drafters=2))
    assert (indices(found), found.degraded) == ([1, 2], ())


def test_drafters_left_out_are_named_when_they_are_missed() -> None:
    found = plan([KnownDrafter(0, is_up=False), KnownDrafter(1, fingerprint="g")])
    assert indices(found) == []
    assert [(one.component, one.reason) for one in found.degraded] == [
        ("drafter-0", "UNAVAILABLE"),
        ("drafter-1", "TOKENIZER_MISMATCH"),
    ]


def test_source_that_is_not_offered_leaves_the_drafter_out() -> None:
    found = plan([KnownDrafter(0)], options=DraftOptions(sources=(DraftSource.MODEL,)))
    assert found.degraded[0].reason == "MISSING_CAPABILITY"
    assert "CAPABILITY_DRAFT_TOKENS" in found.degraded[0].detail


def test_drafter_that_went_while_nothing_was_asked_of_it_is_named_once() -> None:
    drafters = [KnownDrafter(0), KnownDrafter(1, is_up=False), KnownDrafter(2, is_up=False)]
    gone = find_gone_drafters(drafters, named={"drafter-1"})
    assert [(one.component, one.reason) for one in gone] == [("drafter-2", "UNAVAILABLE")]


def test_error_without_drafters_says_whether_waiting_helps() -> None:
    mismatched = plan([KnownDrafter(0, fingerprint="g")])
    assert isinstance(no_drafters_error(mismatched), FailedPrecondition)
    down = plan([KnownDrafter(0, fingerprint="g"), KnownDrafter(1, is_up=False)])
    error = no_drafters_error(down)
    assert isinstance(error, UpstreamUnavailable)
    assert "connection refused" in error.message
    assert error.retry_delay_s


def test_coupled_drafters_share_the_key_and_others_get_one_of_their_own() -> None:
    key = hashlib.sha256(b"k").digest()[:16]
    assert derive_draft_key(key, VerificationMode.COUPLED) == key
    other = derive_draft_key(key, VerificationMode.REJECTION)
    assert len(other) == 16
    assert other != key
    assert other == derive_draft_key(key, VerificationMode.REJECTION)
