"""``specrag up``, ``specrag down`` and ``specrag status``."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from specrag_common.runtime.errors import SpecragError

from specrag_client.cli.failure import EXIT_BAD_INPUT, EXIT_SERVICE_ERROR, CommandError
from specrag_client.cli.foreground import bring_up
from specrag_client.cli.output import print_json
from specrag_client.cli.parameters import (
    FiniteRange,
    TextType,
    UrlType,
    directory_option,
    json_option,
    target_options,
    with_directory,
)
from specrag_client.cli.running import run_async
from specrag_client.cli.stack_progress import StackProgress
from specrag_client.stack.health import Health, check_processes, check_service
from specrag_client.stack.options import MAX_DRAFTERS, MIN_DRAFTERS, StackOptions
from specrag_client.stack.plan import SERVICE_NAMES
from specrag_client.stack.record import RecordError, StackRecord
from specrag_client.stack.state import (
    StackBusyError,
    StackPhase,
    StackState,
    holding_folder,
    inspect,
    stop_stack,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@click.command()
@click.option("--detach", is_flag=True, help="Return once everything is healthy.")
@click.option(
    "--drafters",
    type=click.IntRange(MIN_DRAFTERS, MAX_DRAFTERS),
    default=2,
    show_default=True,
    help="Drafter processes.",
)
@click.option(
    "--redis-url",
    type=UrlType("redis", "rediss", "unix"),
    help="Use this Redis instead of starting one.",
)
@click.option(
    "--milvus-uri",
    type=UrlType("http", "https"),
    help="Use this Milvus instead of starting one.",
)
@click.option("--target-model", type=TextType(), help="Model reference of the verifier.")
@click.option("--draft-model", type=TextType(), help="Model reference of the drafters.")
@click.option(
    "--wait",
    "start_timeout_s",
    type=FiniteRange(1, 7200),
    default=300,
    show_default=True,
    help="Seconds until everything must be healthy.",
)
@directory_option
def up(
    directory: Path,
    drafters: int,
    redis_url: str | None,
    milvus_uri: str | None,
    target_model: str | None,
    draft_model: str | None,
    start_timeout_s: float,
    *,
    detach: bool,
) -> int:
    """Start the local stack; without --detach, stop it again at Ctrl-C.

    Settings of single services are read from the environment (SPECRAG_<SERVICE>_…).
    """
    options = StackOptions(
        directory=directory,
        num_drafters=drafters,
        redis_url=redis_url,
        milvus_uri=milvus_uri,
        target_model=target_model,
        draft_model=draft_model,
        start_timeout_s=start_timeout_s,
        foreground=not detach,
    )
    try:
        with holding_folder(directory):
            state = _inspect(directory)
            if state.record is None:
                return asyncio.run(bring_up(options))
    except StackBusyError as exc:
        state = _inspect(directory)
        if state.record is None:
            raise CommandError(str(exc), exit_code=EXIT_BAD_INPUT) from exc
    except OSError as exc:
        raise CommandError(f"cannot use {directory}: {exc.strerror}", exit_code=2) from exc
    return _already_there(state, directory)


@click.command()
@directory_option
def down(directory: Path) -> int:
    """Stop the local stack: no new answers, running ones finish, then everything ends."""
    if _inspect(directory).record is None:
        click.echo(f"nothing runs in {directory}")
        return 0
    started = time.monotonic()
    with StackProgress() as progress:
        killed = run_async(stop_stack(directory, report=progress.report))
    seconds = time.monotonic() - started
    click.echo(f"stopped the stack in {directory} in {seconds:.1f} s")
    if killed:
        click.echo(f"had to be killed: {', '.join(killed)}", err=True)
    return 0


@click.command()
@json_option
@target_options
def status(directory: Path, endpoint: str | None, *, as_json: bool) -> int:
    """Show each process of the stack and whether it is healthy; exit code 3 if one is not."""
    if endpoint is not None:
        return _endpoint_status(endpoint, as_json=as_json)
    state = _inspect(directory)
    if state.record is None:
        raise CommandError(
            f"no stack runs in {directory}; start one with: "
            f"{with_directory('specrag up --detach', directory)}"
        )
    health = run_async(check_processes(state.record.processes))
    if as_json:
        _print_status_json(state.record, health)
    else:
        _print_status_table(state.record, health)
    healthy = state.phase is StackPhase.RUNNING and all(
        one is Health.HEALTHY for one in health.values()
    )
    return 0 if healthy else EXIT_SERVICE_ERROR


def _inspect(directory: Path) -> StackState:
    try:
        return inspect(directory)
    except RecordError as exc:
        raise CommandError(str(exc)) from exc


def _already_there(state: StackState, directory: Path) -> int:
    record = state.record
    assert record is not None, "only a stack that was found is already there"
    if state.phase is StackPhase.STARTING:
        raise CommandError(f"the stack in {directory} is being started", exit_code=EXIT_BAD_INPUT)
    health = run_async(check_processes(record.processes))
    ill = [f"{name} ({one})" for name, one in health.items() if one is not Health.HEALTHY]
    if ill or state.phase is StackPhase.BROKEN:
        raise CommandError(
            f"a stack is there in {directory}, but not whole: {', '.join(ill) or 'half started'}; "
            f"stop it first with: {with_directory('specrag down', directory)}",
            exit_code=EXIT_BAD_INPUT,
        )
    click.echo(f"the stack in {directory} runs already; endpoint {record.endpoint}")
    return 0


def _endpoint_status(endpoint: str, *, as_json: bool) -> int:
    try:
        health = run_async(check_service(endpoint, SERVICE_NAMES["orchestrator"]))
    except SpecragError:
        health = Health.UNREACHABLE
    if as_json:
        print_json({"endpoint": endpoint, "health": health.value}, sys.stdout, indent=2)
    else:
        click.echo(f"{endpoint} is {health}")
    return 0 if health is Health.HEALTHY else EXIT_SERVICE_ERROR


def _print_status_json(record: StackRecord, health: Mapping[str, Health]) -> None:
    print_json(
        {
            "endpoint": record.endpoint,
            "retriever": record.retriever,
            "milvus_uri": record.milvus_uri,
            "redis_url": record.redis_url,
            "processes": [
                {
                    "name": one.name,
                    "pid": one.pid,
                    "address": one.address,
                    "health": health[one.name].value,
                    "log": one.log,
                }
                for one in record.processes
            ],
        },
        sys.stdout,
        indent=2,
    )


def _print_status_table(record: StackRecord, health: Mapping[str, Health]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("process", "pid", "address", "health"):
        table.add_column(heading)
    for one in record.processes:
        answer = health[one.name]
        style = "green" if answer is Health.HEALTHY else "red"
        table.add_row(one.name, str(one.pid), one.address, f"[{style}]{answer}[/]")
    Console(highlight=False).print(table)
