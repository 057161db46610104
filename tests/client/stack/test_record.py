"""``stack.json`` and telling processes apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from specrag_client.stack.identity import ProcessIdentity
from specrag_client.stack.layout import StackFolder
from specrag_client.stack.record import (
    ProcessRecord,
    RecordError,
    StackRecord,
    read_record,
    write_record,
)
from specrag_client.stack.state import (
    StackBusyError,
    StackPhase,
    holding_folder,
    inspect,
    stop_stack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ME = ProcessIdentity.of(os.getpid())


@pytest.fixture
def sleeper() -> Iterator[ProcessRecord]:
    """A process that sleeps, leading a session of its own."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True
    )
    identity = ProcessIdentity.of(process.pid)
    yield ProcessRecord(
        name="redis",
        pid=process.pid,
        start_mark=identity.start_mark,
        address="127.0.0.1:1",
        log="redis.log",
    )
    process.kill()
    process.wait()


def record_of(*processes: ProcessRecord, **fields: object) -> StackRecord:
    record = StackRecord(
        foreground=False,
        ready=True,
        launcher_pid=ME.pid,
        launcher_start_mark="another boot:1",
        stop_grace_s=5,
        processes=processes,
    )
    return replace(record, **fields)  # type: ignore[arg-type]


def write(directory: Path, record: StackRecord) -> None:
    write_record(StackFolder.at(directory).record_file, record)


def test_record_reads_back_as_written(tmp_path: Path, sleeper: ProcessRecord) -> None:
    record = record_of(sleeper, endpoint="127.0.0.1:2")
    write(tmp_path, record)
    assert read_record(tmp_path / "stack.json") == record


def test_process_keeps_its_place_when_its_address_becomes_known(sleeper: ProcessRecord) -> None:
    first, second = (replace(sleeper, name=name, address="") for name in ("drafter-0", "drafter-1"))
    record = record_of(first, second).with_process(replace(first, address="127.0.0.1:3"))
    assert [(one.name, one.address) for one in record.processes] == [
        ("drafter-0", "127.0.0.1:3"),
        ("drafter-1", ""),
    ]


def test_missing_record_means_that_nothing_runs(tmp_path: Path) -> None:
    assert read_record(tmp_path / "stack.json") is None
    assert inspect(tmp_path).phase is StackPhase.NONE


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"version": 1}', '{"version": 9, "processes": []}']
)
def test_damaged_record_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "stack.json").write_text(content)
    with pytest.raises(RecordError, match=r"stack\.json"):
        read_record(tmp_path / "stack.json")


def test_running_process_is_found_running(tmp_path: Path, sleeper: ProcessRecord) -> None:
    write(tmp_path, record_of(sleeper))
    assert inspect(tmp_path).phase is StackPhase.RUNNING


def test_number_given_to_another_process_since_is_not_taken_for_ours(
    tmp_path: Path, sleeper: ProcessRecord
) -> None:
    boot = sleeper.start_mark.split(":")[0]
    for stale_mark in (f"{boot}:1", "another boot:1"):
        write(tmp_path, record_of(replace(sleeper, start_mark=stale_mark)))
        assert inspect(tmp_path).phase is StackPhase.NONE


async def test_stopping_never_signals_a_process_that_is_not_ours(
    tmp_path: Path, sleeper: ProcessRecord
) -> None:
    write(tmp_path, record_of(replace(sleeper, start_mark="another boot:1")))
    await stop_stack(tmp_path)
    assert sleeper.identity.is_alive()
    stale = replace(sleeper, start_mark="another boot:1").identity
    stale.send(signal.SIGKILL)
    stale.kill_session()
    assert sleeper.identity.is_alive()


async def test_stopping_ends_the_process_and_forgets_the_record(
    tmp_path: Path, sleeper: ProcessRecord
) -> None:
    write(tmp_path, record_of(sleeper))
    assert await stop_stack(tmp_path) == []
    assert not sleeper.identity.is_alive()
    assert inspect(tmp_path).phase is StackPhase.NONE
    assert read_record(StackFolder.at(tmp_path).record_file) is None


def test_stack_of_a_living_launcher_that_is_not_ready_is_starting(
    tmp_path: Path, sleeper: ProcessRecord
) -> None:
    starting = record_of(sleeper, ready=False, launcher_start_mark=ME.start_mark)
    write(tmp_path, starting)
    assert inspect(tmp_path).phase is StackPhase.STARTING
    write(tmp_path, replace(starting, launcher_start_mark="another boot:1"))
    assert inspect(tmp_path).phase is StackPhase.BROKEN


def test_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""], start_new_session=True)
    identity = ProcessIdentity.of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.is_alive()
    process.wait()
    assert not identity.is_alive()


def test_process_left_in_the_session_of_an_ended_leader_is_found() -> None:
    script = (
        "import subprocess, sys; "
        "command = [sys.executable, '-S', '-c', 'import time; time.sleep(60)']; "
        "print(subprocess.Popen(command, stdout=subprocess.DEVNULL).pid, flush=True); "
        "sys.stdin.read()"
    )
    leader = subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    identity = ProcessIdentity.of(leader.pid)
    assert leader.stdout is not None
    child = int(leader.stdout.readline())
    assert identity.session_members() == [child]
    leader.communicate()
    assert not identity.is_alive()
    assert identity.session_members() == [child]
    identity.kill_session()
    assert identity.session_members() == []


def test_folder_can_be_held_by_one_only(tmp_path: Path) -> None:
    with holding_folder(tmp_path / "stack"):
        pass
    with holding_folder(tmp_path / "stack"), pytest.raises(StackBusyError, match="stack"):
        _hold(tmp_path / "stack")


def test_preparing_keeps_the_last_logs_and_forgets_ports(tmp_path: Path) -> None:
    folder = StackFolder.at(tmp_path)
    folder.prepare()
    folder.log_file("redis").write_text("first run")
    folder.port_file("verifier").write_text("1")
    folder.prepare()
    assert (tmp_path / "logs" / "redis.log.1").read_text() == "first run"
    assert not folder.log_file("redis").exists()
    assert not folder.port_file("verifier").exists()


def test_record_is_readable_json_with_addresses(tmp_path: Path, sleeper: ProcessRecord) -> None:
    write(tmp_path, record_of(sleeper))
    fields = json.loads((tmp_path / "stack.json").read_text())
    assert fields["processes"][0]["address"] == "127.0.0.1:1"


def _hold(directory: Path) -> None:
    with holding_folder(directory):
        pass
