"""Errors become one line that is safe to print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_client.cli.failure import line_of, print_error
from specrag_common.runtime.errors import NotFound

if TYPE_CHECKING:
    import pytest


def test_error_of_a_service_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(line_of(NotFound("no collection \x1b[2J\x1b]0;owned\x07\nnamed 'x'")))
    written = capsys.readouterr().err
    assert written == "error: no collection \ufffd[2J\ufffd]0;owned\ufffd named 'x'\n"
