"""``specrag sessions``: list, show and delete conversations."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from specrag_client.cli.output import print_json
from specrag_client.cli.parameters import TextType, json_option, target_options, tenant_option
from specrag_client.cli.running import run_async
from specrag_client.cli.screen_text import printable
from specrag_client.cli.target import orchestrator_address
from specrag_client.client import SpecragClient

if TYPE_CHECKING:
    from pathlib import Path

    from specrag_client.sessions import Session, SessionTurn


@click.group()
def sessions() -> None:
    """Read and delete conversations."""


@sessions.command("list")
@tenant_option
@json_option
@target_options
def list_sessions(
    tenant: str | None, directory: Path, endpoint: str | None, *, as_json: bool
) -> None:
    """List all sessions, newest first."""
    address = orchestrator_address(directory, endpoint)
    found = run_async(_all_sessions(address, tenant or ""))
    if as_json:
        print_json({"sessions": [_session_object(one) for one in found]}, sys.stdout, indent=2)
        return
    for one in found:
        updated = f"{one.update_time:%Y-%m-%d %H:%M:%S} UTC"
        click.echo(f"{printable(one.session_id)}  {one.num_turns} turns  {updated}")


@sessions.command("show")
@click.argument("session_id", type=TextType())
@tenant_option
@json_option
@target_options
def show_session(
    session_id: str, tenant: str | None, directory: Path, endpoint: str | None, *, as_json: bool
) -> None:
    """Show the turns of one session, oldest first."""
    address = orchestrator_address(directory, endpoint)
    session, turns = run_async(_all_turns(address, session_id, tenant or ""))
    if as_json:
        shown = {**_session_object(session), "turns": [_turn_object(one) for one in turns]}
        print_json(shown, sys.stdout, indent=2)
        return
    for turn in turns:
        mark = " (cut off)" if turn.partial else ""
        click.echo(f"? {printable(turn.question)}\n{printable(turn.answer)}{mark}\n")


@sessions.command("delete")
@click.argument("session_id", type=TextType())
@tenant_option
@target_options
def delete_session(
    session_id: str, tenant: str | None, directory: Path, endpoint: str | None
) -> None:
    """Delete one session with all its turns."""
    address = orchestrator_address(directory, endpoint)
    num_turns = run_async(_delete(address, session_id, tenant or ""))
    click.echo(f"deleted {session_id} with {num_turns} turns")


async def _all_sessions(address: str, tenant: str) -> list[Session]:
    found: list[Session] = []
    async with SpecragClient(address) as client:
        page = await client.list_sessions(tenant=tenant, page_size=100)
        found += page.sessions
        while page.next_page_token:
            page = await client.list_sessions(
                tenant=tenant, page_size=100, page_token=page.next_page_token
            )
            found += page.sessions
    return found


async def _all_turns(
    address: str, session_id: str, tenant: str
) -> tuple[Session, list[SessionTurn]]:
    async with SpecragClient(address) as client:
        page = await client.get_session(session_id, tenant=tenant, page_size=100)
        turns = list(page.turns)
        while page.next_page_token:
            page = await client.get_session(
                session_id, tenant=tenant, page_size=100, page_token=page.next_page_token
            )
            turns += page.turns
    return page.session, turns


async def _delete(address: str, session_id: str, tenant: str) -> int:
    async with SpecragClient(address) as client:
        return await client.delete_session(session_id, tenant=tenant)


def _session_object(session: Session) -> dict[str, Any]:
    return {
        "session_id": session.session_id,
        "num_turns": session.num_turns,
        "create_time": session.create_time.isoformat(),
        "update_time": session.update_time.isoformat(),
    }


def _turn_object(turn: SessionTurn) -> dict[str, Any]:
    fields = asdict(turn)
    return {
        **fields,
        "finish_reason": turn.finish_reason.value,
        "end_time": turn.end_time.isoformat(),
        "citations": [
            {key: value for key, value in one.items() if key != "seq"}
            for one in fields["citations"]
        ],
    }
