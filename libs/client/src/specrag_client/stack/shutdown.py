"""Stopping a stack in order, leaving nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Final

from specrag_client.stack.plan import kind_of
from specrag_client.stack.polling import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from specrag_client.stack.record import ProcessRecord

STOP_ORDER: Final = (
    ("orchestrator",),
    ("verifier", "drafter"),
    ("retriever",),
    ("milvus",),
    ("redis",),
)
"""Kinds of processes, first those that others wait for last: callers before what they call."""

_STRAGGLER_GRACE_S: Final = 2.0
_KILL_TIMEOUT_S: Final = 10.0


async def stop_processes(
    processes: Iterable[ProcessRecord],
    *,
    grace_s: float,
    report: Callable[[str, str], None] = lambda _name, _state: None,
) -> list[str]:
    """Stop processes stage by stage; return the names of those that had to be killed.

    Each gets a SIGTERM and ``grace_s`` seconds, then a SIGKILL; whatever a process leaves in its
    session goes the same way. Cancelling kills everything at once.
    """
    listed = list(processes)
    killed: list[str] = []
    try:
        for kinds in STOP_ORDER:
            stage = [one for one in listed if kind_of(one.name) in kinds]
            killed += await _stop_stage(stage, grace_s=grace_s, report=report)
    except asyncio.CancelledError:
        for one in listed:
            one.identity.kill_session()
        raise
    return killed


async def _stop_stage(
    stage: Sequence[ProcessRecord], *, grace_s: float, report: Callable[[str, str], None]
) -> list[str]:
    for one in stage:
        if one.identity.is_alive():
            report(one.name, "stopping")
            one.identity.send(signal.SIGTERM)
    await wait_until(lambda: not any(one.identity.is_alive() for one in stage), timeout_s=grace_s)
    killed = [one.name for one in stage if one.identity.is_alive()]
    for name in killed:
        report(name, f"did not stop within {grace_s:g} s: killed")
    for one in stage:
        await _end_stragglers(one)
    return killed


async def _end_stragglers(process: ProcessRecord) -> None:
    """End what is left of a process's session: first politely, then for good."""
    identity = process.identity
    if not identity.is_alive():
        for pid in identity.session_members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        await wait_until(lambda: not identity.session_members(), timeout_s=_STRAGGLER_GRACE_S)
    identity.kill_session()
    await wait_until(lambda: not identity.is_alive(), timeout_s=_KILL_TIMEOUT_S)
