"""Runs the services a measurement needs, each as a process of its own, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.channels import open_channel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 15.0
UNREACHABLE: Final = "127.0.0.1:1"
"""Address of a service that is not there: requests bring their own passages."""


class ServiceStartError(Exception):
    """A service did not come up; the message ends with what it said last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Addresses of what runs; ``orchestrator`` is empty where none was asked for."""

    verifier: str
    drafters: tuple[str, ...]
    orchestrator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """What to start.

    Attributes:
        num_drafters: suffix drafters.
        with_orchestrator: whether requests go through one.
        model: reference of the target, whose tokenizer the drafters use too; empty: the bundled
            one.
        verifier: settings of the verifier beyond the address, without prefix.
        orchestrator: settings of the orchestrator.
    """

    num_drafters: int
    with_orchestrator: bool = False
    model: str = ""
    verifier: Mapping[str, str] = field(default_factory=dict)
    orchestrator: Mapping[str, str] = field(default_factory=dict)


@contextlib.asynccontextmanager
async def running_services(plan: ServicePlan) -> AsyncIterator[Services]:
    """Start the services, yield their addresses once they are ready, stop them."""
    with tempfile.TemporaryDirectory(prefix="specrag-bench-") as folder:
        starter = _Starter(Path(folder))
        try:
            model = {"MODEL": plan.model} if plan.model else {}
            verifier = starter.start("verifier", {**model, **plan.verifier})
            drafters = [
                starter.start("drafter", {**model, "SOURCES": "suffix"}, number=index)
                for index in range(plan.num_drafters)
            ]
            addresses = [await starter.wait(name) for name in (verifier, *drafters)]
            orchestrator = ""
            if plan.with_orchestrator:
                settings = {
                    "RETRIEVER_ADDRESS": UNREACHABLE,
                    "VERIFIER_ADDRESS": addresses[0],
                    "DRAFTER_ADDRESSES": ",".join(addresses[1:]),
                    **plan.orchestrator,
                }
                orchestrator = await starter.wait(starter.start("orchestrator", settings))
            yield Services(
                verifier=addresses[0], drafters=tuple(addresses[1:]), orchestrator=orchestrator
            )
        finally:
            starter.stop()


class _Starter:
    """Starts processes and reads where they listen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._services: dict[str, str] = {}

    def start(self, service: str, settings: Mapping[str, str], *, number: int = 0) -> str:
        """Start a service and return the name to wait for it by."""
        name = f"{service}-{number}"
        prefix = f"SPECRAG_{service.upper()}_"
        variables = {**settings, "PORT_FILE": str(self._folder / f"{name}.port")}
        assignments = [f"{prefix}{key}={value}" for key, value in variables.items()]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                ["env", *assignments, sys.executable, "-m", f"specrag_{service}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._services[name] = "Rag" if service == "orchestrator" else service.capitalize()
        return name

    async def wait(self, name: str) -> str:
        """Return the address of a service once it is ready.

        Raises:
            ServiceStartError: it ended, or is not ready in time.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        port_file = self._folder / f"{name}.port"
        while time.monotonic() < deadline:
            if self._processes[name].poll() is not None:
                break
            if port_file.exists() and port_file.read_text().strip():
                address = f"127.0.0.1:{port_file.read_text().strip()}"
                if await _is_ready(address, f"specrag.v1.{self._services[name]}Service"):
                    return address
            await asyncio.sleep(0.2)
        tail = (self._folder / f"{name}.log").read_text(errors="replace")[-2000:]
        raise ServiceStartError(f"{name} is not ready after {START_TIMEOUT_S:.0f} s:\n{tail}")

    def stop(self) -> None:
        """End every process; whoever does not in time is killed."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _is_ready(address: str, service: str) -> bool:
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415 - only while starting
    from specrag_common.runtime.errors import SpecragError  # noqa: PLC0415

    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2.0)
        except SpecragError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
