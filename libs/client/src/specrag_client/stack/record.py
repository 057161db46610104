"""``stack.json``: what runs in a stack's folder, and where it is reached."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from specrag_client.stack.identity import ProcessIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

RECORD_VERSION: Final = 1


class RecordError(Exception):
    """``stack.json`` is there but cannot be read; ``str`` is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """One process of a stack.

    Attributes:
        name: ``orchestrator``, ``drafter-0`` …
        pid: its number; also the id of its session.
        start_mark: see :class:`~specrag_client.stack.identity.ProcessIdentity`.
        address: ``HOST:PORT``, empty until it is known.
        log: file with its output.
    """

    name: str
    pid: int
    start_mark: str
    address: str
    log: str

    @property
    def identity(self) -> ProcessIdentity:
        """The process itself."""
        return ProcessIdentity(self.pid, self.start_mark)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRecord:
    """Everything about a stack that another process may need.

    Attributes:
        ready: all processes answered healthy once.
        foreground: the launcher stays and stops the rest when it ends.
        launcher_pid: the process that started the stack.
        launcher_start_mark: its start.
        stop_grace_s: longest time a process gets to end by itself.
        endpoint: the orchestrator's address; empty until it is known.
        retriever: the retriever's address; empty until it is known.
        milvus_uri: the vector store, ours or another one's.
        redis_url: the turn log, ours or another one's.
        processes: in the order they were started.
    """

    ready: bool = False
    foreground: bool
    launcher_pid: int
    launcher_start_mark: str
    stop_grace_s: float
    endpoint: str = ""
    retriever: str = ""
    milvus_uri: str = ""
    redis_url: str = ""
    processes: tuple[ProcessRecord, ...] = ()

    @property
    def launcher(self) -> ProcessIdentity:
        """The process that started the stack."""
        return ProcessIdentity(self.launcher_pid, self.launcher_start_mark)

    def with_process(self, process: ProcessRecord) -> StackRecord:
        """Return a record in which ``process`` stands: where one of its name stood, or last."""
        by_name = {one.name: one for one in self.processes} | {process.name: process}
        return replace(self, processes=tuple(by_name.values()))

    def living(self) -> Iterable[ProcessRecord]:
        """Return the processes that still run, or left something running."""
        return [
            one
            for one in self.processes
            if one.identity.is_alive() or one.identity.session_members()
        ]


def read_record(path: Path) -> StackRecord | None:
    """Return what the file says, or ``None`` when there is none.

    Raises:
        RecordError: the file cannot be read or is not a record.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise RecordError(f"cannot read {path}: {exc.strerror}") from exc
    try:
        fields: dict[str, Any] = json.loads(content)
        if fields.pop("version") != RECORD_VERSION:
            raise RecordError(f"{path} was written by another version of specrag; delete it")
        processes = tuple(ProcessRecord(**one) for one in fields.pop("processes"))
        return StackRecord(**fields, processes=processes)
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise RecordError(f"{path} is damaged; delete it when nothing of it runs any more") from exc


def write_record(path: Path, record: StackRecord) -> None:
    """Write the record whole, or not at all."""
    fields = {"version": RECORD_VERSION, **asdict(record)}
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
