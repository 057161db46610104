"""Every call to Milvus goes through :func:`guarded`: a limit in time, and errors in our terms.

The limit is ours and not the client library's, whose own timeouts are not kept while it connects.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, TypeVar

import grpc
from pymilvus.exceptions import ErrorCode, MilvusException
from specrag_common.runtime import deadlines
from specrag_common.runtime.errors import (
    Capacity,
    DeadlineExceeded,
    InternalError,
    NotFound,
    SpecragError,
    UpstreamUnavailable,
)
from specrag_common.runtime.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable

READ_TIMEOUT_S: Final = 10.0
WRITE_TIMEOUT_S: Final = 60.0
PROBE_TIMEOUT_S: Final = 2.0

_CONNECT_CODE: Final = 2
_NOT_LOADED_CODE: Final = 101
_UNREACHABLE: Final = ("fail connecting", "unavailable", "deadline", "timeout", "connection")

_T = TypeVar("_T")


class CollectionNotLoadedError(Exception):
    """The server holds the collection on disk only; the caller loads it and tries again."""


_log = get_logger(__name__)


async def guarded(call: Awaitable[_T], what: str, limit_s: float = READ_TIMEOUT_S) -> _T:
    """Await a call for at most ``limit_s``, or what is left of the request's time.

    Raises:
        DeadlineExceeded: the request's own time is used up.
        UpstreamUnavailable: Milvus does not answer or cannot be reached.
        CollectionNotLoadedError: the collection must be loaded first.
        NotFound: the collection does not exist.
        Capacity: Milvus limits the rate.
        InternalError: Milvus refused; its words are in the log.
    """
    allowed_s = deadlines.timeout(limit_s)
    try:
        async with asyncio.timeout(allowed_s):
            return await call
    except TimeoutError as exc:
        if allowed_s < limit_s:
            raise DeadlineExceeded(f"{what}: the request's time ran out") from exc
        raise UpstreamUnavailable(f"{what}: Milvus gave no answer in {limit_s:g} s") from exc
    except (MilvusException, grpc.RpcError) as exc:
        raise translate(exc, what) from exc


def translate(exc: Exception, what: str) -> SpecragError | CollectionNotLoadedError:
    """Return the error in our terms for one of the client library's."""
    code = getattr(exc, "code", None)
    message = str(getattr(exc, "message", "") or exc)
    if code == ErrorCode.COLLECTION_NOT_FOUND:
        return NotFound(f"{what}: no such collection", reason="COLLECTION_NOT_FOUND")
    if code == _NOT_LOADED_CODE:
        return CollectionNotLoadedError(f"{what}: the collection is not loaded")
    if code in {ErrorCode.RATE_LIMIT, ErrorCode.FORCE_DENY}:
        return Capacity(f"{what}: Milvus limits the rate", retry_delay_s=2.0)
    is_rpc_error = isinstance(exc, grpc.RpcError)
    if code == _CONNECT_CODE or is_rpc_error or _mentions(message, _UNREACHABLE):
        return UpstreamUnavailable(f"{what}: Milvus cannot be reached", retry_delay_s=1.0)
    _log.error("milvus refused a call", what=what, code=str(code), error=message[:500])
    return InternalError(f"{what}: Milvus refused the call (code {code}); see the service's log")


def _mentions(message: str, words: tuple[str, ...]) -> bool:
    lower = message.lower()
    return any(word in lower for word in words)
