"""Finding the services a command talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specrag_client.cli.failure import CommandError
from specrag_client.cli.parameters import with_directory
from specrag_client.stack.record import RecordError
from specrag_client.stack.state import StackPhase, inspect

if TYPE_CHECKING:
    from pathlib import Path

    from specrag_client.stack.record import StackRecord


def orchestrator_address(directory: Path, endpoint: str | None) -> str:
    """Return where questions go.

    Raises:
        CommandError: no endpoint is given and no stack runs in the folder.
    """
    _refuse_both(endpoint)
    if endpoint is not None:
        return endpoint
    return _address_of(_running(directory), "orchestrator", directory)


def retriever_address(directory: Path, endpoint: str | None, retriever: str | None) -> str:
    """Return where documents go: ``--retriever``, else ``--endpoint``, else the local stack's.

    A gateway may serve both services at one endpoint; one that does not answers UNIMPLEMENTED.

    Raises:
        CommandError: no address is given and no stack runs in the folder.
    """
    _refuse_both(endpoint or retriever)
    if retriever is not None:
        return retriever
    if endpoint is not None:
        return endpoint
    return _address_of(_running(directory), "retriever", directory)


def _refuse_both(address: str | None) -> None:
    source = click.get_current_context().get_parameter_source("directory")
    if address is not None and source is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give --dir (a local stack) or an address, not both")


def _running(directory: Path) -> StackRecord:
    try:
        state = inspect(directory)
    except RecordError as exc:
        raise CommandError(str(exc)) from exc
    if state.record is None:
        raise CommandError(
            f"no stack runs in {directory}; start one with: "
            f"{with_directory('specrag up --detach', directory)}, "
            "or name one with --endpoint HOST:PORT"
        )
    if state.phase is StackPhase.STARTING:
        raise CommandError(f"the stack in {directory} is still starting; try again shortly")
    return state.record


def _address_of(record: StackRecord, name: str, directory: Path) -> str:
    for process in record.processes:
        if process.name == name and process.address and process.identity.is_alive():
            return process.address
    raise CommandError(
        f"the {name} of the stack in {directory} is not running; "
        f"restart the stack with: {with_directory('specrag down', directory)}, "
        f"then {with_directory('specrag up --detach', directory)}"
    )
