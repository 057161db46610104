"""Time left for the request being served, carried in a context variable.

The server interceptor sets it; every outgoing call takes ``min(its own timeout, what is left)``,
because grpc.aio does not hand deadlines on by itself.
"""

from __future__ import annotations

import time
from contextvars import ContextVar

_deadline: ContextVar[float | None] = ContextVar("specrag_deadline", default=None)


def set_remaining(remaining_s: float | None) -> None:
    """Bind the time left of the current context; ``None`` means no deadline."""
    _deadline.set(None if remaining_s is None else time.monotonic() + remaining_s)


def remaining_s() -> float | None:
    """Return the seconds left, never below 0, or ``None`` without a deadline."""
    deadline = _deadline.get()
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def timeout(default_s: float) -> float:
    """Return the timeout for an outgoing call: ``default_s``, or what is left if that is less."""
    left = remaining_s()
    return default_s if left is None else min(default_s, left)
