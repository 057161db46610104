"""What a folder says about its stack, held against what really runs."""

from __future__ import annotations

import contextlib
import fcntl
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

from specrag_client.stack.layout import StackFolder
from specrag_client.stack.polling import wait_until
from specrag_client.stack.record import read_record
from specrag_client.stack.shutdown import STOP_ORDER, stop_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from specrag_client.stack.record import StackRecord


class StackPhase(StrEnum):
    """In which state a stack is."""

    NONE = "nothing runs"
    STARTING = "starting"
    RUNNING = "running"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackState:
    """A stack as found; ``record`` is there unless nothing runs.

    Attributes:
        phase: the state.
        record: what ``stack.json`` says.
        dead: names of processes that should run and do not.
    """

    phase: StackPhase
    record: StackRecord | None = None
    dead: tuple[str, ...] = ()


class StackBusyError(Exception):
    """Another process starts or runs the stack of this folder."""


def inspect(directory: Path) -> StackState:
    """Look at the stack of a folder without asking its processes anything.

    Raises:
        RecordError: ``stack.json`` is damaged.
    """
    record = read_record(StackFolder.at(directory).record_file)
    if record is None:
        return StackState(phase=StackPhase.NONE)
    launcher_alive = record.launcher.is_alive()
    if not record.living() and not (launcher_alive and not record.ready):
        return StackState(phase=StackPhase.NONE)
    if launcher_alive and not record.ready:
        return StackState(phase=StackPhase.STARTING, record=record)
    dead = tuple(one.name for one in record.processes if not one.identity.is_alive())
    broken = bool(dead) or not record.ready
    phase = StackPhase.BROKEN if broken else StackPhase.RUNNING
    return StackState(phase=phase, record=record, dead=dead)


@contextlib.contextmanager
def holding_folder(directory: Path) -> Iterator[None]:
    """Create the folder and hold its lock.

    Raises:
        StackBusyError: another process holds it.
        OSError: the folder cannot be made or written.
    """
    folder = StackFolder.at(directory)
    folder.root.mkdir(parents=True, exist_ok=True)
    with folder.lock_file.open("w", encoding="ascii") as lock:
        _lock(lock, directory)
        yield


async def stop_stack(
    directory: Path, *, report: Callable[[str, str], None] = lambda _name, _state: None
) -> list[str]:
    """Stop whatever runs in a folder; return the names of processes that had to be killed.

    A launcher that is still there stops its own stack; what it leaves is stopped from here.

    Raises:
        RecordError: ``stack.json`` is damaged.
    """
    state = inspect(directory)
    if state.record is None:
        return []
    record = state.record
    launcher = record.launcher
    if launcher.is_alive() and (record.foreground or not record.ready):
        report("launcher", "stopping")
        launcher.send(signal.SIGTERM)
        longest_s = record.stop_grace_s * len(STOP_ORDER)
        await wait_until(lambda: not launcher.is_alive(), timeout_s=longest_s)
        launcher.send(signal.SIGKILL)
    killed = await stop_processes(record.processes, grace_s=record.stop_grace_s, report=report)
    StackFolder.at(directory).forget_record()
    return killed


def _lock(lock: TextIO, directory: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise StackBusyError(f"another process starts or runs the stack in {directory}") from exc
