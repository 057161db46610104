"""Real processes: what a signal does to them, and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import asyncio, sys
import grpc
from specrag_common.runtime.errors import FailedPrecondition
from specrag_common.runtime.lifecycle import Lifecycle, run_service
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.settings import ServiceSettings, load_settings

settings = load_settings(ServiceSettings)

async def slow(request, _context):
    for byte in request:
        yield bytes([byte])
        await asyncio.sleep(0.1)

async def close(name):
    await asyncio.sleep(0.01)
    print("closed", name, flush=True)

async def serve(lifecycle):
    lifecycle.on_close(lambda: close("store"))
    server = lifecycle.serve(GrpcServer(settings, services=["t.T"]))
    handler = grpc.unary_stream_rpc_method_handler(
        slow, request_deserializer=bytes, response_serializer=bytes
    )
    server.grpc.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("t.T", {"Slow": handler})]
    )
    lifecycle.on_close(lambda: close("engine"))
    await server.start()
    server.set_ready("t.T")
"""

RUN = "\nrun_service('tester', settings, build)\n"

Start = Callable[..., "Service"]


class Service:
    """A service process and its files."""

    def __init__(self, folder: Path, program: str, **variables: str) -> None:
        self.port_file = folder / "port"
        self.trace_file = folder / "spans.jsonl"
        script = folder / "service.py"
        script.write_text(PROGRAM + textwrap.dedent(program) + RUN)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                "PATH": os.environ["PATH"],  # noqa: TID251 - the child needs a PATH
                "SPECRAG_PORT_FILE": str(self.port_file),
                "SPECRAG_TRACE_FILE": str(self.trace_file),
                "SPECRAG_LOG_FORMAT": "json",
                "SPECRAG_DRAIN_NOTICE_S": "0.05",
                **variables,
            },
        )

    def wait_port(self) -> int:
        give_up = time.monotonic() + 20
        while not self.port_file.exists():
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < give_up
            time.sleep(0.02)
        return int(self.port_file.read_text())

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=15)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    services: list[Service] = []

    def begin(program: str, **variables: str) -> Service:
        services.append(Service(tmp_path, program, **variables))
        return services[-1]

    yield begin
    for service in services:
        service.process.kill()
        service.process.communicate()


def slow_method(channel: grpc.aio.Channel) -> Any:
    return channel.unary_stream("/t.T/Slow")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_during_a_stream_lets_it_finish_and_exits_0(
    start: Start, number: signal.Signals
) -> None:
    service = start("build = serve")
    port = await asyncio.to_thread(service.wait_port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="t.T")
        )
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = slow_method(channel)(b"abcdefgh")
        answer = await stream.read()

        service.process.send_signal(number)

        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        while (message := await stream.read()) is not grpc.aio.EOF:
            answer += message
    code, out, err = await asyncio.to_thread(service.end)

    assert answer == b"abcdefgh"
    assert (code, out) == (0, "closed engine\nclosed store\n"), err
    assert "Traceback" not in err
    spans = [json.loads(line) for line in service.trace_file.read_text().splitlines()]
    assert [span["name"] for span in spans] == ["t.T/Slow"]
    assert all(json.loads(line)["service"] == "tester" for line in err.splitlines())


async def test_second_signal_leaves_at_once(start: Start) -> None:
    service = start("build = serve")
    port = await asyncio.to_thread(service.wait_port)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = slow_method(channel)(b"x" * 200)
        await stream.read()
        service.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert service.process.poll() is None
        service.process.send_signal(signal.SIGTERM)
        code, _, _ = await asyncio.to_thread(service.end)

    assert code == 130


def test_signal_while_starting_closes_what_was_opened_and_exits_0(start: Start) -> None:
    service = start("""
        async def build(lifecycle):
            await serve(lifecycle)
            await asyncio.sleep(60)
    """)
    service.wait_port()
    service.process.send_signal(signal.SIGTERM)

    code, out, err = service.end()

    assert (code, out) == (0, "closed engine\nclosed store\n"), err


def test_typed_error_while_starting_is_one_line_and_exit_1(start: Start) -> None:
    service = start("""
        async def build(lifecycle):
            lifecycle.on_close(lambda: close("store"))
            raise FailedPrecondition("tp_size=6 does not divide num_kv_heads=8; valid: 1, 2, 4, 8")
    """)

    code, out, err = service.end()

    assert (code, out) == (1, "closed store\n")
    assert "tp_size=6 does not divide" in err
    assert "Traceback" not in err


def test_failed_service_drains_and_exits_1(start: Start) -> None:
    service = start("""
        async def build(lifecycle):
            await serve(lifecycle)
            asyncio.get_running_loop().call_later(0.1, lifecycle.fail, "the engine died")
    """)

    code, out, err = service.end()

    assert (code, out) == (1, "closed engine\nclosed store\n")
    assert "the engine died" in err


def test_bad_setting_exits_2_with_one_line(start: Start) -> None:
    service = start("build = serve", SPECRAG_DRAIN_GRACE_S="-1")

    code, _, err = service.end()

    assert code == 2
    assert err.startswith("error: SPECRAG_DRAIN_GRACE_S='-1': ")
    assert err.count("\n") == 1
