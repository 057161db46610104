from __future__ import annotations

from collections import Counter

import grpc
import pytest
from specrag_common.runtime import errors
from specrag_common.runtime.error_status import (
    from_rpc_error,
    from_status,
    to_status,
    trailing_metadata_of,
)
from specrag_common.runtime.errors import ERROR_TYPES, FieldViolation, SpecragError


def build(cls: type[SpecragError]) -> SpecragError:
    if cls is errors.InvalidRequest:
        return errors.InvalidRequest("top_p", "1.5 is not within (0, 1]")
    if cls is errors.SequenceTooLong:
        return errors.SequenceTooLong("question", num_tokens=5000, max_tokens=4096)
    return cls("what happened")


def all_subclasses(cls: type[SpecragError]) -> set[type[SpecragError]]:
    direct = set(cls.__subclasses__())
    return direct.union(*(all_subclasses(one) for one in direct))


def test_error_types_lists_every_class_of_the_tree() -> None:
    ours = {one for one in all_subclasses(SpecragError) if one.__module__ == errors.__name__}

    assert set(ERROR_TYPES) == ours


def test_every_class_has_a_reason_of_its_own() -> None:
    repeated = [
        reason
        for reason, count in Counter(one.default_reason for one in ERROR_TYPES).items()
        if count > 1
    ]

    assert repeated == []


@pytest.mark.parametrize("cls", ERROR_TYPES)
def test_error_survives_the_wire_with_all_its_details(cls: type[SpecragError]) -> None:
    error = build(cls)
    error.retry_delay_s = 1.25
    error.metadata = {"limit": "4096"}
    error.violations = (FieldViolation("a.b", "too long"), FieldViolation("c", "is blank"))

    back = from_status(to_status(error))

    assert type(back) is cls
    assert (back.message, back.reason, back.status) == (error.message, error.reason, error.status)
    assert back.retryable == error.retryable
    assert back.violations == error.violations
    assert back.metadata == error.metadata
    assert back.retry_delay_s == pytest.approx(1.25)


@pytest.mark.parametrize("cls", ERROR_TYPES)
def test_error_without_details_gains_none_on_the_wire(cls: type[SpecragError]) -> None:
    error = SpecragError.__new__(cls)
    SpecragError.__init__(error, "m")

    back = from_status(to_status(error))

    assert (back.violations, back.retry_delay_s, back.metadata) == ((), None, {})


def test_reason_of_an_instance_survives_the_wire() -> None:
    error = errors.FailedPrecondition("another embedder", reason="EMBEDDER_MISMATCH")

    back = from_status(to_status(error))

    assert type(back) is errors.FailedPrecondition
    assert back.reason == "EMBEDDER_MISMATCH"


@pytest.mark.parametrize("code", [one for one in grpc.StatusCode if one is not grpc.StatusCode.OK])
def test_every_status_of_a_foreign_server_becomes_an_error(code: grpc.StatusCode) -> None:
    foreign = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="as they say"
    )

    error = from_rpc_error(foreign)

    folded = {
        grpc.StatusCode.UNKNOWN: grpc.StatusCode.INTERNAL,
        grpc.StatusCode.OUT_OF_RANGE: grpc.StatusCode.INVALID_ARGUMENT,
    }
    assert error.status is folded.get(code, code)
    assert error.message == "as they say"


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    ],
)
def test_message_for_a_peer_that_does_not_answer_says_which_method_was_called(
    code: grpc.StatusCode,
) -> None:
    foreign = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), grpc.aio.Metadata(), details="refused"
    )

    error = from_rpc_error(foreign, method="/specrag.v1.RetrieverService/Search")

    assert error.message == "specrag.v1.RetrieverService/Search: refused"


def test_message_of_our_own_server_stays_as_it_was_written() -> None:
    trailing = grpc.aio.Metadata(*trailing_metadata_of(errors.NotFound("no session 's'")))
    ours = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, details="no session 's'"
    )

    assert from_rpc_error(ours, method="/specrag.v1.RagService/A").message == "no session 's'"


def test_damaged_details_fall_back_to_the_status_code() -> None:
    trailing = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    foreign = grpc.aio.AioRpcError(
        grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), trailing, details="gone"
    )

    assert isinstance(from_rpc_error(foreign), errors.NotFound)


def test_reason_of_another_status_does_not_choose_the_class() -> None:
    status = to_status(errors.SessionBusy("busy"))
    status.code = grpc.StatusCode.NOT_FOUND.value[0]

    assert type(from_status(status)) is errors.NotFound


def test_invalid_request_reports_several_fields_in_one_message() -> None:
    found = [FieldViolation("top_k", "-1 is below 0"), FieldViolation("question", "is blank")]

    error = errors.InvalidRequest.of(found)

    assert error.violations == tuple(found)
    assert str(error) == "top_k: -1 is below 0; question: is blank"


def test_long_message_is_cut_to_fit_into_trailers() -> None:
    status = to_status(errors.InternalError("x" * 100_000))

    assert len(status.message) == 2000
