# ruff: noqa: N818 - callers read `raise NotFound`; a suffix says nothing more
"""The error tree of every service. Domain code raises these; :mod:`.error_status` carries them.

::

    SpecragError
    ├── InvalidRequest (INVALID_ARGUMENT)      the caller must change the request
    │   └── SequenceTooLong
    ├── NotFound, AlreadyExists, PermissionDenied, Unauthenticated, Unsupported
    ├── FailedPrecondition                     the state must change first
    │   └── SessionFull
    ├── Aborted                                a race was lost; the whole turn may be tried again
    │   └── SessionBusy
    ├── Capacity (RESOURCE_EXHAUSTED)          refused at admission, nothing was started
    ├── UpstreamUnavailable (UNAVAILABLE)      something we need cannot be reached
    │   └── TurnNotSaved
    ├── DeadlineExceeded, Cancelled
    └── InternalError
        ├── ModelFailure                       a model, its weights or its process failed
        └── DataLoss

``reason`` is the machine-readable name (UPPER_SNAKE) that travels as ``google.rpc.ErrorInfo``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One request field and what is wrong with it.

    Attributes:
        field: path of the field in the request, as ``sampling.temperature``.
        description: what, the value and the limit.
    """

    field: str
    description: str


class SpecragError(Exception):
    """Base of every error that may reach a caller.

    Attributes:
        status: the gRPC status the class stands for.
        retryable: whether the same call may succeed later without any change by the caller.
        default_reason: ``reason`` of instances that name none.
    """

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL
    retryable: ClassVar[bool] = False
    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        retry_delay_s: float | None = None,
        violations: Iterable[FieldViolation] = (),
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Keep everything that travels.

        Args:
            message: one line for people: what, the value, the limit, the way out.
            reason: UPPER_SNAKE name; the class's own when absent.
            retry_delay_s: seconds to wait before trying again, when that is known.
            violations: fields at fault.
            metadata: further machine-readable facts; never secrets, prompts or passages.
        """
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.retry_delay_s = retry_delay_s
        self.violations = tuple(violations)
        self.metadata = dict(metadata or {})


class InvalidRequest(SpecragError):
    """A field of the request is missing, malformed, unsupported or out of range."""

    status = grpc.StatusCode.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"

    def __init__(self, field: str, description: str, *, reason: str | None = None) -> None:
        """Name the field and what is wrong with it: the value, the limit, the way out."""
        violation = FieldViolation(field, description)
        super().__init__(f"{field}: {description}", reason=reason, violations=[violation])

    @classmethod
    def of(cls, violations: Iterable[FieldViolation]) -> InvalidRequest:
        """Report several fields at once; at least one violation is needed."""
        found = tuple(violations)
        assert found, "an InvalidRequest needs a violation"
        message = "; ".join(f"{one.field}: {one.description}" for one in found)
        error = cls(found[0].field, found[0].description)
        SpecragError.__init__(error, message, violations=found)
        return error


class SequenceTooLong(InvalidRequest):
    """A prompt, or prompt plus answer, does not fit the model's context."""

    default_reason = "SEQUENCE_TOO_LONG"

    def __init__(self, field: str, *, num_tokens: int, max_tokens: int) -> None:
        """State both lengths in tokens of the model that refused."""
        super().__init__(field, f"num_tokens={num_tokens} exceeds max_tokens={max_tokens}")
        self.metadata = {"num_tokens": str(num_tokens), "max_tokens": str(max_tokens)}


class NotFound(SpecragError):
    """The named thing does not exist, or is not the caller's to see."""

    status = grpc.StatusCode.NOT_FOUND
    default_reason = "NOT_FOUND"


class AlreadyExists(SpecragError):
    """The thing to be made exists with other properties."""

    status = grpc.StatusCode.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class PermissionDenied(SpecragError):
    """The caller is known and may not do this."""

    status = grpc.StatusCode.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class Unauthenticated(SpecragError):
    """The caller did not prove who it is."""

    status = grpc.StatusCode.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class Unsupported(SpecragError):
    """This server cannot do what was asked, whatever the arguments."""

    status = grpc.StatusCode.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class FailedPrecondition(SpecragError):
    """The system is in a state that forbids the request; retrying alone does not help."""

    status = grpc.StatusCode.FAILED_PRECONDITION
    default_reason = "FAILED_PRECONDITION"


class SessionFull(FailedPrecondition):
    """A session holds as many turns or bytes as it may; begin another one."""

    default_reason = "SESSION_FULL"


class Aborted(SpecragError):
    """A concurrent change won; the caller may start its whole operation again."""

    status = grpc.StatusCode.ABORTED
    retryable = True
    default_reason = "ABORTED"


class SessionBusy(Aborted):
    """Another turn of the same session is running."""

    default_reason = "SESSION_BUSY"


class Capacity(SpecragError):
    """Full at admission: nothing was started. ``retry_delay_s`` says when to come again."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True
    default_reason = "CAPACITY"


class UpstreamUnavailable(SpecragError):
    """A store or service that this request needs cannot be reached."""

    status = grpc.StatusCode.UNAVAILABLE
    retryable = True
    default_reason = "UPSTREAM_UNAVAILABLE"


class TurnNotSaved(UpstreamUnavailable):
    """The answer ended but its turn could not be written to the turn log."""

    default_reason = "TURN_NOT_SAVED"


class DeadlineExceeded(SpecragError):
    """The time the caller gave is used up."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(SpecragError):
    """The call was cancelled on purpose. Not a task's own ``CancelledError``."""

    status = grpc.StatusCode.CANCELLED
    default_reason = "CANCELLED"


class InternalError(SpecragError):
    """A fault of ours; the message carries an id to look up in the logs."""


class ModelFailure(InternalError):
    """A model, its weights, its numbers (NaN, inf) or its process failed."""

    default_reason = "MODEL_FAILURE"


class DataLoss(InternalError):
    """Stored data is unreadable or fails its checksum."""

    status = grpc.StatusCode.DATA_LOSS
    default_reason = "DATA_LOSS"


ERROR_TYPES: tuple[type[SpecragError], ...] = (
    InvalidRequest,
    SequenceTooLong,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    Unauthenticated,
    Unsupported,
    FailedPrecondition,
    SessionFull,
    Aborted,
    SessionBusy,
    Capacity,
    UpstreamUnavailable,
    TurnNotSaved,
    DeadlineExceeded,
    Cancelled,
    InternalError,
    ModelFailure,
    DataLoss,
)
"""Every concrete class of the tree; classes come after their bases."""
