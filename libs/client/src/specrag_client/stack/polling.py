"""Waiting for what happens in other processes, which can only be looked at."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S: Final = 0.05


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = float("inf")) -> bool:
    """Look every 50 ms; return True once the condition holds, False when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(_POLL_S)
    return True
