"""Faults of other services, told to our caller as ours and not as the caller's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import Cancelled, ModelFailure, UpstreamUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

RETRY_HINT_S = 1.0
"""What callers are told to wait while a service that an answer needs is away."""


@contextmanager
def peer_errors(peer: str) -> Iterator[None]:
    """Turn a stream that ``peer`` cancelled into UNAVAILABLE: nobody here asked for it."""
    try:
        yield
    except Cancelled as exc:
        raise UpstreamUnavailable(
            f"the {peer} ended the stream: {exc.message}", retry_delay_s=RETRY_HINT_S
        ) from exc


def malformed(peer: str, detail: str) -> ModelFailure:
    """Return the error for a message that breaks the contract."""
    return ModelFailure(f"the {peer} sent a malformed message: {detail}")
