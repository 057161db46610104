"""``specrag up``, ``down`` and ``status`` without a stack."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from specrag_client.stack.state import holding_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.client.conftest import Outcome

    Specrag = Callable[..., Outcome]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--drafters", "0"], "--drafters"),
        (["--drafters", "17"], "--drafters"),
        (["--wait", "nan"], "--wait"),
        (["--redis-url", "localhost:6379"], "redis://"),
        (["--milvus-uri", "grpc://x:1"], "http://"),
        (["--target-model", ""], "--target-model"),
    ],
)
def test_bad_argument_of_up_is_named_in_one_line(
    specrag: Specrag, tmp_path: Path, arguments: list[str], named: str
) -> None:
    outcome = specrag("up", "--detach", "--dir", tmp_path / "stack", *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    assert named in outcome.err
    assert not (tmp_path / "stack").exists()


def test_folder_that_cannot_be_made_is_bad_input(specrag: Specrag, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        outcome = specrag("up", "--detach", "--dir", directory)
        assert outcome.code == 2
        assert outcome.err.count("\n") == 1
        assert str(directory) in outcome.err


def test_second_up_while_the_first_starts_says_so(specrag: Specrag, tmp_path: Path) -> None:
    with holding_folder(tmp_path):
        outcome = specrag("up", "--detach", "--dir", tmp_path)
    assert outcome.code == 2
    assert "another process starts or runs the stack" in outcome.err


def test_down_with_nothing_running_is_no_error(specrag: Specrag, tmp_path: Path) -> None:
    outcome = specrag("down", "--dir", tmp_path)
    assert (outcome.code, outcome.out) == (0, f"nothing runs in {tmp_path}\n")


def test_status_with_nothing_running_names_the_way_out(specrag: Specrag, tmp_path: Path) -> None:
    outcome = specrag("status", "--dir", tmp_path)
    assert outcome.code == 3
    assert "specrag up" in outcome.err


@pytest.mark.parametrize("command", [["status"], ["ask", "Who?", "--collection", "c"]])
def test_command_to_copy_names_the_folder_quoted(
    specrag: Specrag, tmp_path: Path, command: list[str]
) -> None:
    folder = tmp_path / "my stack"
    outcome = specrag(*command, "--dir", folder)
    assert outcome.code == 3
    assert f"specrag up --detach --dir '{folder}'" in outcome.err


@pytest.mark.parametrize(
    "command", [["up", "--detach"], ["down"], ["status"], ["sessions", "list"]]
)
def test_damaged_record_is_named_in_one_line(
    specrag: Specrag, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "stack.json").write_text("{")
    outcome = specrag(*command, "--dir", tmp_path)
    assert outcome.code == 3
    assert outcome.err == (
        f"error: {tmp_path / 'stack.json'} is damaged; delete it when nothing of it runs any more\n"
    )


def test_status_of_an_endpoint_asks_its_health(specrag: Specrag, orchestrator: str) -> None:
    unreachable = specrag("status", "--endpoint", "127.0.0.1:1", "--json")
    assert unreachable.code == 3
    assert json.loads(unreachable.out) == {"endpoint": "127.0.0.1:1", "health": "unreachable"}
    assert specrag("status", "--endpoint", orchestrator).code == 3


def test_trace_that_is_not_on_file_is_bad_input(specrag: Specrag, tmp_path: Path) -> None:
    outcome = specrag("trace", "ab" * 16, "--dir", tmp_path)
    assert outcome.code == 2
    assert "no trace" in outcome.err
