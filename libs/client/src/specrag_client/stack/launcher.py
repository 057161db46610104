"""Starting a stack: what waits for what, and until when."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from specrag_client.stack.health import Health, check_process, check_redis
from specrag_client.stack.identity import ProcessIdentity
from specrag_client.stack.layout import StackFolder
from specrag_client.stack.plan import ProcessSpec, StackPlan, drafter_names
from specrag_client.stack.polling import wait_until
from specrag_client.stack.processes import ChildProcess, StackError, read_tail
from specrag_client.stack.record import StackRecord, write_record
from specrag_client.stack.servers import (
    PortOwner,
    ServerNotFoundError,
    find_free_port,
    find_redis_server,
    milvus_command,
    owner_of,
    redis_command,
)
from specrag_client.stack.shutdown import stop_processes

if TYPE_CHECKING:
    from specrag_client.stack.options import StackOptions

Report: TypeAlias = Callable[[str, str], None]
"""Told the name of a process and its state, whenever that changes."""

_HEALTH_POLL_S: Final = 0.2
_PORT_ATTEMPTS: Final = 5


class StackLauncher:
    """Starts the processes of one stack, and stops them."""

    def __init__(
        self,
        options: StackOptions,
        report: Report,
        *,
        choose_port: Callable[[], int] = find_free_port,
    ) -> None:
        """Prepare to start; whoever calls holds the lock of the folder.

        Args:
            options: what to start.
            report: told of every change of state.
            choose_port: proposes ports for Redis and Milvus.
        """
        self._choose_port = choose_port
        self._options = options
        self._report = report
        self._folder = StackFolder.at(options.directory)
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
        self._plan = StackPlan(options, self._folder, num_cores=num_cores)
        self._children: dict[str, ChildProcess] = {}
        self._states: dict[str, str] = {}
        me = ProcessIdentity.of(os.getpid())
        self.record = StackRecord(
            foreground=options.foreground,
            launcher_pid=me.pid,
            launcher_start_mark=me.start_mark,
            stop_grace_s=options.drain_grace_s + options.kill_margin_s,
        )

    def report_to(self, report: Report) -> None:
        """Tell another one from now on."""
        self._report = report

    async def start(self) -> StackRecord:
        """Start everything and return once all processes are healthy.

        On any failure, and when cancelled, everything that was started is stopped first.

        Raises:
            StackError: a process died, a server is missing, or the time is up.
        """
        try:
            self._folder.prepare()
            self._save(self.record)
            async with asyncio.timeout(self._options.start_timeout_s):
                await self._start_all()
        except TimeoutError as exc:
            error = self._timeout_error()
            await self.stop()
            raise error from exc
        except OSError as exc:
            await self.stop()
            raise StackError(f"cannot use the folder {self._folder.root}: {exc}") from exc
        except BaseException:
            await self.stop()
            raise
        self._save(replace(self.record, ready=True))
        return self.record

    async def stop(self) -> list[str]:
        """Stop everything in order and forget the record; return who had to be killed."""
        killed = await stop_processes(
            self.record.processes, grace_s=self.record.stop_grace_s, report=self._report
        )
        self._folder.forget_record()
        self.exit_codes()  # Reaps them.
        return killed

    def exit_codes(self) -> dict[str, int]:
        """Return the exit codes of those processes that have ended."""
        codes = {name: child.exit_code for name, child in self._children.items()}
        return {name: code for name, code in codes.items() if code is not None}

    async def _start_all(self) -> None:
        drafters = drafter_names(self._options)
        try:
            async with asyncio.TaskGroup() as group:
                redis_url = group.create_task(self._redis())
                retriever = group.create_task(self._retriever(group))
                verifier = group.create_task(self._service(self._plan.verifier(), group))
                drafting = [
                    group.create_task(self._service(self._plan.drafter(name), group))
                    for name in drafters
                ]
                group.create_task(
                    self._orchestrator(group, redis_url, retriever, verifier, drafting)
                )
        except* StackError as errors:
            raise _first_of(errors) from None

    async def _redis(self) -> str:
        url = self._options.redis_url
        if url is not None:
            await self._require_redis(url)
        else:
            try:
                binary = find_redis_server()
            except ServerNotFoundError as exc:
                raise StackError(str(exc)) from exc
            address = await self._server(
                "redis",
                lambda port: redis_command(binary, data_dir=self._folder.redis_data, port=port),
            )
            url = f"redis://{address}/0"
        self._save(replace(self.record, redis_url=url))
        return url

    async def _require_redis(self, url: str) -> None:
        try:
            health = await check_redis(url)
        except ValueError as exc:
            raise StackError(f"{url!r} is not a Redis URL: {exc}") from exc
        if health is not Health.HEALTHY:
            raise StackError(f"Redis at {url} is {health}")

    async def _retriever(self, group: asyncio.TaskGroup) -> str:
        uri = self._options.milvus_uri
        if uri is None:
            try:
                address = await self._server(
                    "milvus",
                    lambda port: milvus_command(data_dir=self._folder.milvus_data, port=port),
                )
            except ServerNotFoundError as exc:
                raise StackError(str(exc)) from exc
            uri = f"http://{address}"
        self._save(replace(self.record, milvus_uri=uri))
        address = await self._service(self._plan.retriever(uri), group)
        self._save(replace(self.record, retriever=address))
        return address

    async def _orchestrator(
        self,
        group: asyncio.TaskGroup,
        redis_url: asyncio.Task[str],
        retriever: asyncio.Task[str],
        verifier: asyncio.Task[str],
        drafters: list[asyncio.Task[str]],
    ) -> None:
        spec = self._plan.orchestrator(
            retriever=await retriever,
            verifier=await verifier,
            drafters=[await drafter for drafter in drafters],
            redis_url=await redis_url,
        )
        address = await self._service(spec, group)
        self._save(replace(self.record, endpoint=address))

    async def _server(self, name: str, command: Callable[[int], list[str]]) -> str:
        """Start Redis or Milvus on a port of its own; they cannot choose one by themselves."""
        for _attempt in range(_PORT_ATTEMPTS):
            port = self._choose_port()
            child = self._spawn(self._plan.server(name, command(port)), f"127.0.0.1:{port}")
            owner = await _settle_owner(child, port)
            if owner is PortOwner.OURS and child.exit_code is None:
                await self._until_healthy(child)
                return f"127.0.0.1:{port}"
            child.kill()
            if owner not in {PortOwner.OTHERS, PortOwner.SHARED}:
                break
        raise child.died_error()

    async def _service(self, spec: ProcessSpec, group: asyncio.TaskGroup) -> str:
        """Start one of our services and return its address once it listens.

        The group goes on waiting for its health: who calls it may start meanwhile.
        """
        child = self._spawn(spec, "")
        port_file = self._folder.port_file(spec.name)
        await wait_until(lambda: child.exit_code is not None or port_file.exists())
        if not port_file.exists():
            raise child.died_error()
        address = f"127.0.0.1:{port_file.read_text(encoding='ascii').strip()}"
        self._save(self.record.with_process(child.record(address)))
        group.create_task(self._until_healthy(child))
        return address

    async def _until_healthy(self, child: ChildProcess) -> None:
        process = next(one for one in self.record.processes if one.name == child.name)
        while True:
            if child.exit_code is not None:
                raise child.died_error()
            health = await check_process(process)
            self._set_state(child.name, health)
            if health is Health.HEALTHY:
                return
            await asyncio.sleep(_HEALTH_POLL_S)

    def _spawn(self, spec: ProcessSpec, address: str) -> ChildProcess:
        child = ChildProcess(
            spec, self._folder.log_file(spec.name), tethered=self._options.foreground
        )
        self._children[spec.name] = child
        self._save(self.record.with_process(child.record(address)))
        self._set_state(spec.name, Health.STARTING)
        return child

    def _save(self, record: StackRecord) -> None:
        self.record = record
        write_record(self._folder.record_file, record)

    def _set_state(self, name: str, state: str) -> None:
        if self._states.get(name) != state:
            self._states[name] = state
            self._report(name, state)

    def _timeout_error(self) -> StackError:
        waiting = [name for name, state in self._states.items() if state != Health.HEALTHY]
        tail = read_tail(self._folder.log_file(waiting[0])) if waiting else ""
        named = ", ".join(f"{name} ({self._states[name]})" for name in waiting)
        return StackError(
            f"not healthy after {self._options.start_timeout_s:g} s: {named or 'nothing started'}",
            log_tail=tail,
        )


async def _settle_owner(child: ChildProcess, port: int) -> PortOwner:
    """Wait until a child listens or has ended; tell who listens then."""

    def owner() -> PortOwner:
        return owner_of(port, child.identity.pid)

    await wait_until(
        lambda: child.exit_code is not None or owner() in {PortOwner.OURS, PortOwner.SHARED}
    )
    return owner()


def _first_of(errors: ExceptionGroup[StackError]) -> StackError:
    first = errors.exceptions[0]
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    return first
