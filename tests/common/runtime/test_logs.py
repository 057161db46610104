from __future__ import annotations

import contextvars
import json
import logging
from typing import TYPE_CHECKING

import pytest
import structlog
from opentelemetry import trace
from specrag_common.runtime import call_context
from specrag_common.runtime.logs import get_logger, set_up_logs
from specrag_common.runtime.settings import LogFormat, LogLevel

from tests.common.runtime.serving import make_recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Return what was written to stderr since the last call."""
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    yield lambda: capsys.readouterr().err
    root.handlers[:], root.level = before
    structlog.reset_defaults()


def lines(written: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in written.splitlines()]


def test_json_lines_carry_service_trace_and_request(stderr: Callable[[], str]) -> None:
    set_up_logs("verifier", log_format=LogFormat.JSON)
    recorder = make_recorder("verifier")

    def serve() -> None:
        call_context.bind_request_id("r-1")
        call_context.bind_session_id("s-1")
        get_logger("here").info("round verified", accepted=3)

    with trace.use_span(recorder.tracer.start_span("s"), end_on_exit=True) as current:
        contextvars.copy_context().run(serve)

    (line,) = lines(stderr())
    assert line["event"] == "round verified"
    assert (line["service"], line["level"], line["accepted"]) == ("verifier", "info", 3)
    assert line["trace_id"] == trace.format_trace_id(current.get_span_context().trace_id)
    assert (line["request_id"], line["session_id"]) == ("r-1", "s-1")
    assert str(line["timestamp"]).endswith("Z")


def test_standard_loggers_take_the_same_path(stderr: Callable[[], str]) -> None:
    set_up_logs("verifier", log_format=LogFormat.JSON, level=LogLevel.WARNING)

    logging.getLogger("pymilvus").warning("slow %s", "search")
    logging.getLogger("pymilvus").info("not shown")

    (line,) = lines(stderr())
    assert (line["event"], line["service"]) == ("slow search", "verifier")


def test_library_that_brought_its_own_stream_takes_the_same_path(
    stderr: Callable[[], str],
) -> None:
    library = logging.getLogger("library_with_a_stream")
    library.addHandler(logging.StreamHandler())
    library.propagate = False

    set_up_logs("verifier", log_format=LogFormat.JSON)
    library.warning("reconnecting")

    (line,) = lines(stderr())
    assert (line["event"], line["service"]) == ("reconnecting", "verifier")


@pytest.mark.parametrize("log_format", [LogFormat.JSON, LogFormat.CONSOLE])
def test_traceback_shows_the_error_but_no_local_variables(
    stderr: Callable[[], str], log_format: LogFormat
) -> None:
    set_up_logs("verifier", log_format=log_format)

    def fail(prompt: str) -> None:
        raise ValueError("no blocks")

    try:
        fail("my " + "secret")
    except ValueError as exc:
        get_logger("here").error("crashed", exc_info=exc)

    written = stderr()
    assert "no blocks" in written
    assert "my secret" not in written


def test_auto_is_json_where_stderr_is_no_terminal(stderr: Callable[[], str]) -> None:
    set_up_logs("verifier", log_format=LogFormat.AUTO)

    get_logger("here").info("hello")

    assert lines(stderr())[0]["event"] == "hello"
