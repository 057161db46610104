"""Whole stacks, as ``specrag up`` starts them, with a tiny random model or with the bundled one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from specrag_client.stack.record import StackRecord, read_record
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.testing import build_byte_tokenizer, build_random_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from specrag_client.stack.record import ProcessRecord

HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook"
START_TIMEOUT_S = 180
TINY_MODEL_LEN = 8192

NOTES = {
    "leave.md": "# Leave\n\nAnnual leave is 27 days. The team lead approves it. Ask early.\n",
    "travel/rail.txt": "Trains are booked in second class. Receipts go to the office in Leith.\n",
    "travel/猫.txt": "猫が好きです。駅で魚を食べる🐟。切符は事務所に送ります。\n",
    "empty.txt": "",
}
"""A small collection: its passages fit into the tiny model's context byte by byte."""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The object on stdout."""
        return json.loads(self.out)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON lines on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


@dataclass(frozen=True)
class RunningStack:
    """A stack that answers."""

    directory: Path
    record: StackRecord
    launcher: subprocess.Popen[bytes] = field(compare=False)

    @property
    def endpoint(self) -> str:
        """The orchestrator's address."""
        return self.record.endpoint

    def process(self, name: str) -> ProcessRecord:
        """Return one process of the stack."""
        return next(one for one in self.record.processes if one.name == name)

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that talks to this stack."""
        return specrag_command(*arguments, "--dir", str(self.directory))

    def run(self, *arguments: str, timeout_s: float = 90) -> Outcome:
        """Run a command against this stack to its end."""
        return run_command(self.command(*arguments), timeout_s=timeout_s)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command against this stack; its output is piped, line by line."""
        # Unbuffered: ``communicate`` after some lines would lose what a buffer read ahead.
        return subprocess.Popen(
            self.command(*arguments), bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def said_by_launcher(self) -> str:
        """Return what ``specrag up`` printed so far."""
        return (self.directory / "up.log").read_text()


def specrag_command(*arguments: str) -> list[str]:
    """Return a command line of the installed ``specrag``."""
    return [str(Path(sys.executable).with_name("specrag")), *arguments]


def run_command(command: Sequence[str], *, timeout_s: float = START_TIMEOUT_S) -> Outcome:
    """Run a command to its end."""
    done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())


@contextmanager
def stack_running(
    directory: Path,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    launcher_code: int = 0,
) -> Iterator[RunningStack]:
    """Run ``specrag up`` in the foreground, and check at the end that it leaves nothing."""
    directory.mkdir(parents=True, exist_ok=True)
    inherited = dict(os.environ)  # noqa: TID251 - handed to a child process
    with (directory / "up.log").open("wb") as log:
        launcher = subprocess.Popen(
            specrag_command("up", "--dir", str(directory), *arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=inherited | dict(variables or {}),
            start_new_session=True,
        )
    try:
        record = _wait_ready(launcher, directory)
        yield RunningStack(directory, record, launcher)
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(timeout=120)
        finally:
            launcher.kill()
            launcher.wait()
    assert launcher.returncode == launcher_code, (directory / "up.log").read_text()
    assert [one.name for one in record.processes if one.identity.is_alive()] == []
    assert [one.name for one in record.processes if one.identity.session_members()] == []


def _wait_ready(launcher: subprocess.Popen[bytes], directory: Path) -> StackRecord:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        assert launcher.poll() is None, (directory / "up.log").read_text()
        record = read_record(directory / "stack.json")
        if record is not None and record.ready and record.launcher_pid == launcher.pid:
            return record
        time.sleep(0.1)
    raise AssertionError(f"the stack was not ready in time:\n{(directory / 'up.log').read_text()}")


@pytest.fixture(scope="session")
def run_specrag() -> Callable[..., Outcome]:
    """Return a function that runs ``specrag`` with no stack of its own in mind."""
    return lambda *arguments: run_command(specrag_command(*arguments))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random fp32 model with one token a byte: a model reference."""
    folder = tmp_path_factory.mktemp("tiny_model")
    model = build_random_model("llama", seed=3, max_model_len=TINY_MODEL_LEN)
    with quiet_transformers():
        model.module.save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_arguments(tiny_model: Path) -> list[str]:
    """Arguments of ``specrag up`` for a stack with the tiny model."""
    return ["--target-model", str(tiny_model), "--draft-model", str(tiny_model)]


@pytest.fixture(scope="session")
def notes_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with :data:`NOTES`."""
    folder = tmp_path_factory.mktemp("notes")
    for name, content in NOTES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def make_tiny_stack(tiny_arguments: list[str], notes_folder: Path) -> Callable[[Path], Any]:
    """Return a context manager that runs a stack of its own with the notes in it."""

    @contextmanager
    def make(directory: Path, *, launcher_code: int = 0) -> Iterator[RunningStack]:
        with stack_running(directory, tiny_arguments, launcher_code=launcher_code) as stack:
            outcome = stack.run("ingest", str(notes_folder), "--collection", "notes")
            assert outcome.code == 0, outcome.err
            yield stack

    return make


@pytest.fixture(scope="session")
def tiny_stack(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_stack: Callable[[Path], Any]
) -> Iterator[RunningStack]:
    """A stack with the tiny model and the collection ``notes``; tests leave it as it is."""
    with make_tiny_stack(tmp_path_factory.mktemp("tiny_stack")) as stack:
        yield stack


@pytest.fixture(scope="session")
def bundled_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with the bundled models and the collection ``handbook``; for slow tests."""
    with stack_running(tmp_path_factory.mktemp("bundled_stack")) as stack:
        outcome = stack.run("ingest", str(HANDBOOK / "docs"), "--collection", "handbook")
        assert outcome.code == 0, outcome.err
        yield stack
