"""How this project talks to Redis: one client per process and store, quick to give up.

redis-py drops a connection whose command was cancelled, so its reply never reaches another
caller; the pool here has no lock whose acquisition a second cancel could interrupt.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,  # noqa: A004 - the library's own name
    OutOfMemoryError,
    ReadOnlyError,
    TimeoutError,  # noqa: A004 - the library's own name
)

from specrag_common.runtime.errors import FailedPrecondition, UpstreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

CONNECT_TIMEOUT_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 1.5
MAX_CONNECTIONS: Final = 256

_UNAVAILABLE: Final = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OutOfMemoryError,
    OSError,
)


def open_redis(url: str) -> Redis:
    """Return a client of the server at ``url`` (``redis://…`` or ``unix://…``), not yet connected.

    A command that gets no reply in 1.5 s fails; one retry on a fresh connection hides a restarted
    server. Close it with ``await client.aclose()``.

    Raises:
        FailedPrecondition: ``url`` is none; the message does not repeat it, it may hold a password.
    """
    try:
        pool = ConnectionPool.from_url(
            url,
            max_connections=MAX_CONNECTIONS,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            socket_timeout=COMMAND_TIMEOUT_S,
            retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.2), 1),
        )
    except ValueError as exc:
        raise FailedPrecondition(
            "the Redis URL must look like redis://host:port/0, rediss://… or unix://path",
            reason="BAD_REDIS_URL",
        ) from exc
    return Redis.from_pool(pool)


@contextmanager
def redis_errors(what: str) -> Iterator[None]:
    """Turn a lost, slow, loading or full server into ``UpstreamUnavailable``.

    Args:
        what: the operation, for the message: ``cannot {what}: …``.
    """
    try:
        yield
    except _UNAVAILABLE as exc:
        raise UpstreamUnavailable(
            f"cannot {what}: the session store does not answer ({exc})",
            reason="SESSION_STORE_UNAVAILABLE",
            retry_delay_s=1.0,
        ) from exc
