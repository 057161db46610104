"""Identifiers of the request being served, carried in context variables.

The server interceptor binds them, the log renderer prints them and outgoing calls hand the
request id on.
"""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar
from typing import Final

REQUEST_ID_KEY: Final = "x-request-id"
"""Metadata key of the request id, in both directions."""

_VALID_ID: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

_request_id: ContextVar[str | None] = ContextVar("specrag_request_id", default=None)
_session_id: ContextVar[str | None] = ContextVar("specrag_session_id", default=None)


def request_id() -> str | None:
    """Return the id of the request being served, if any."""
    return _request_id.get()


def session_id() -> str | None:
    """Return the session of the request being served, if any."""
    return _session_id.get()


def bind_request_id(value: str | None) -> str:
    """Bind ``value``, or a fresh id when it is absent or not printable, and return what was bound.

    A caller's id goes into logs and metadata: anything but 1–128 plain characters is replaced.
    """
    bound = value if value is not None and _VALID_ID.fullmatch(value) else uuid.uuid4().hex
    _request_id.set(bound)
    return bound


def bind_session_id(value: str | None) -> None:
    """Bind the session whose turn is being served, for logs and spans."""
    _session_id.set(value)
