"""Where a local stack keeps its files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class StackFolder:
    """The folder of one stack; ``root`` is absolute."""

    root: Path

    @classmethod
    def at(cls, directory: Path) -> StackFolder:
        """Return the layout of a folder, which need not exist."""
        return cls(directory.absolute())

    @property
    def record_file(self) -> Path:
        """What runs, and where."""
        return self.root / "stack.json"

    @property
    def lock_file(self) -> Path:
        """Held by whoever starts, or runs in the foreground, this stack."""
        return self.root / "lock"

    @property
    def milvus_data(self) -> Path:
        """Documents and vectors."""
        return self.root / "milvus"

    @property
    def redis_data(self) -> Path:
        """Sessions."""
        return self.root / "redis"

    @property
    def traces(self) -> Path:
        """One file of finished spans a process."""
        return self.root / "traces"

    def log_file(self, process: str) -> Path:
        """Everything a process wrote to stdout and stderr since it started."""
        return self.root / "logs" / f"{process}.log"

    def trace_file(self, process: str) -> Path:
        """Finished spans of a process, one JSON object a line."""
        return self.traces / f"{process}.jsonl"

    def port_file(self, process: str) -> Path:
        """Where a service writes the port it bound."""
        return self.root / "run" / f"{process}.port"

    def forget_record(self) -> None:
        """Delete ``stack.json``: nothing runs any more."""
        self.record_file.unlink(missing_ok=True)

    def prepare(self) -> None:
        """Create the folders; forget ports and set logs and traces of the last run aside."""
        for folder in (self.milvus_data, self.redis_data):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("logs", "traces", "run"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for port_file in (self.root / "run").glob("*.port"):
            port_file.unlink()
        for folder, ending in ((self.root / "logs", "log"), (self.traces, "jsonl")):
            for path in folder.glob(f"*.{ending}"):
                path.replace(path.with_name(f"{path.name}.1"))
