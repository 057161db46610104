"""``specrag trace``: one request across all services."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specrag_client.cli.parameters import TextType, directory_option
from specrag_client.cli.screen_text import printable
from specrag_client.stack.layout import StackFolder
from specrag_client.trace_tree import read_trace, tree_lines

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@click.argument("trace_id", type=TextType())
@directory_option
def trace(trace_id: str, directory: Path) -> None:
    """Show what happened in one request of the local stack: every step, when and how long.

    TRACE_ID stands below each answer. Spans reach the files a second after they end.
    """
    folder = StackFolder.at(directory).traces
    roots = read_trace(folder, trace_id)
    if not roots:
        raise click.UsageError(f"no trace {trace_id} in {folder}")
    for line in tree_lines(roots):
        click.echo(printable(line))
