"""Errors on the wire: :class:`SpecragError` to ``google.rpc.Status`` and back, without loss.

``ErrorInfo`` (reason, domain, metadata) is always present; ``BadRequest`` when fields are at fault;
``RetryInfo`` when a delay is known. Statuses of other servers map by their code alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from specrag_common.runtime import errors
from specrag_common.runtime.errors import FieldViolation, SpecragError

if TYPE_CHECKING:
    from collections.abc import Mapping

ERROR_DOMAIN: Final = "specrag"
"""``ErrorInfo.domain`` of every error of this project."""

STATUS_DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata key of the serialised ``google.rpc.Status``."""

MAX_MESSAGE_CHARS: Final = 2000
"""Longest message put on the wire: trailers share one 8 KiB header limit."""

_CLASS_OF_STATUS: Final[Mapping[grpc.StatusCode, type[SpecragError]]] = {
    grpc.StatusCode.CANCELLED: errors.Cancelled,
    grpc.StatusCode.UNKNOWN: errors.InternalError,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Capacity,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.ABORTED: errors.Aborted,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.UNIMPLEMENTED: errors.Unsupported,
    grpc.StatusCode.INTERNAL: errors.InternalError,
    grpc.StatusCode.UNAVAILABLE: errors.UpstreamUnavailable,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
}

_STATUSES_OF_TRANSPORT: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    }
)

_CLASS_OF_REASON: Final[Mapping[str, type[SpecragError]]] = {
    one.default_reason: one for one in errors.ERROR_TYPES
}


def to_status(error: SpecragError) -> status_pb2.Status:
    """Return the ``google.rpc.Status`` of an error; ``grpc_status.rpc_status`` understands it."""
    status = status_pb2.Status(
        code=error.status.value[0], message=error.message[:MAX_MESSAGE_CHARS]
    )
    for detail in _details_of(error):
        packed = AnyProto()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def trailing_metadata_of(error: SpecragError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata that carries the error's details."""
    return ((STATUS_DETAILS_KEY, to_status(error).SerializeToString()),)


def from_rpc_error(rpc_error: grpc.aio.AioRpcError, *, method: str = "") -> SpecragError:
    """Return the error a peer sent; one that is not ours maps by its status code alone.

    Args:
        rpc_error: what gRPC raised.
        method: the method called. gRPC's own message for a peer that is not there, silent, or not
            the one meant, does not say what was called: the method is put before it.
    """
    status = _status_of(rpc_error)
    code = rpc_error.code()
    message = rpc_error.details() or code.name.lower().replace("_", " ")
    if status is None or status.code != code.value[0]:
        if method and code in _STATUSES_OF_TRANSPORT:
            message = f"{method.strip('/')}: {message}"
        return _rebuild(_CLASS_OF_STATUS[code], message)
    return from_status(status)


def from_status(status: status_pb2.Status) -> SpecragError:
    """Return the error a ``google.rpc.Status`` (code not OK) stands for."""
    info, bad_request, retry = _unpack(status)
    code = _status_code(status.code)
    cls = _CLASS_OF_STATUS[code]
    if info is not None and info.domain == ERROR_DOMAIN:
        named = _CLASS_OF_REASON.get(info.reason, cls)
        cls = named if named.status is cls.status else cls
    error = _rebuild(cls, status.message, reason=info.reason if info is not None else None)
    if info is not None:
        error.metadata = dict(info.metadata)
    if bad_request is not None:
        error.violations = tuple(
            FieldViolation(one.field, one.description) for one in bad_request.field_violations
        )
    if retry is not None:
        error.retry_delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return error


def _details_of(error: SpecragError) -> list[Message]:
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata
        )
    ]
    if error.violations:
        details.append(
            error_details_pb2.BadRequest(
                field_violations=[
                    error_details_pb2.BadRequest.FieldViolation(
                        field=one.field, description=one.description[:MAX_MESSAGE_CHARS]
                    )
                    for one in error.violations
                ]
            )
        )
    if error.retry_delay_s is not None:
        retry = error_details_pb2.RetryInfo()
        fraction, whole = math.modf(max(0.0, error.retry_delay_s))
        retry.retry_delay.seconds = int(whole)
        retry.retry_delay.nanos = int(fraction * 1e9)
        details.append(retry)
    return details


def _rebuild(cls: type[SpecragError], message: str, *, reason: str | None = None) -> SpecragError:
    """Make an instance without the class's own constructor, whose arguments did not travel."""
    error = cls.__new__(cls)
    SpecragError.__init__(error, message, reason=reason)
    return error


def _status_of(rpc_error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    trailing = rpc_error.trailing_metadata()
    if trailing is None:
        return None
    for key, value in trailing:
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(
    status: status_pb2.Status,
) -> tuple[
    error_details_pb2.ErrorInfo | None,
    error_details_pb2.BadRequest | None,
    error_details_pb2.RetryInfo | None,
]:
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    found: dict[str, bool] = {}
    for detail in status.details:
        for target in (info, bad_request, retry):
            if detail.Is(target.DESCRIPTOR) and detail.Unpack(target):
                found[target.DESCRIPTOR.full_name] = True
    return (
        info if found.get(info.DESCRIPTOR.full_name) else None,
        bad_request if found.get(bad_request.DESCRIPTOR.full_name) else None,
        retry if found.get(retry.DESCRIPTOR.full_name) else None,
    )


def _status_code(number: int) -> grpc.StatusCode:
    for code in grpc.StatusCode:
        if code.value[0] == number and code is not grpc.StatusCode.OK:
            return code
    return grpc.StatusCode.UNKNOWN
