"""Stand-ins for the services: real processes that load nothing, found first on PYTHONPATH."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING

import pytest
from specrag_client.stack.options import StackOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STAND_IN = """
import os, pathlib, signal, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING


def setting(name):
    return os.environ.get("SPECRAG_{KIND}_" + name, "")


def note(text):
    with open(os.environ["STAND_IN_NOTES"], "a") as notes:
        notes.write("{kind} " + text + "\\n")


if setting("MODEL") == "broken":
    sys.exit("model broken is not there")
if setting("MODEL") == "leaky":
    subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)  # left-behind"])
ends = [signal.SIGUSR1] if setting("MODEL") == "stubborn" else [signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
note(setting("MILVUS_URI") + setting("REDIS_URL") + " " + setting("DRAFTER_ADDRESSES"))
board = health.HealthServicer()
if setting("MODEL") != "hanging":
    board.set("specrag.v1.{service}", SERVING)
server = grpc.server(ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(board, server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
port_file = pathlib.Path(setting("PORT_FILE"))
partial = port_file.with_suffix(".part")
partial.write_text(str(port))
partial.replace(port_file)
signal.sigwait(ends)
note("ended")
server.stop(0).wait()
"""

SERVICES = {
    "retriever": "RetrieverService",
    "verifier": "VerifierService",
    "drafter": "DrafterService",
    "orchestrator": "RagService",
}


@pytest.fixture
def notes_file(tmp_path: Path) -> Path:
    """Where the stand-ins write that they start and end."""
    return tmp_path / "notes.txt"


@pytest.fixture
def stand_in_environment(tmp_path: Path, notes_file: Path) -> dict[str, str]:
    """Variables under which ``specrag_verifier`` and the others are stand-ins."""
    for kind, service in SERVICES.items():
        package = tmp_path / "stand_ins" / f"specrag_{kind}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        source = textwrap.dedent(STAND_IN)
        for name, value in (("{KIND}", kind.upper()), ("{kind}", kind), ("{service}", service)):
            source = source.replace(name, value)
        (package / "__main__.py").write_text(source)
    inherited = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}  # noqa: TID251 - handed to child processes
    return inherited | {
        "PYTHONPATH": str(tmp_path / "stand_ins"),
        "STAND_IN_NOTES": str(notes_file),
    }


@pytest.fixture
def options(tmp_path: Path, stand_in_environment: dict[str, str]) -> Callable[..., StackOptions]:
    """Return a function that makes options for a stack of stand-ins."""

    def make(directory: str = "stack", **fields: object) -> StackOptions:
        chosen = {
            "num_drafters": 2,
            "start_timeout_s": 30.0,
            "drain_grace_s": 2.0,
            "environment": stand_in_environment,
            **fields,
        }
        return StackOptions(directory=tmp_path / directory, **chosen)  # type: ignore[arg-type]

    return make
