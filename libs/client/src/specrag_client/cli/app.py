"""The command group; each command lives in a module of its own."""

from __future__ import annotations

import click

from specrag_client.cli.ask import ask
from specrag_client.cli.documents import ingest, search
from specrag_client.cli.sessions import sessions
from specrag_client.cli.stack import down, status, up
from specrag_client.cli.trace import trace


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="specrag-client", prog_name="specrag")
def app() -> None:
    """Answers questions over documents, with drafts checked by one large model.

    Begin with: specrag up --detach, specrag ingest FOLDER --collection NAME,
    specrag ask "…" --collection NAME, specrag down.
    """


for _command in (up, down, status, ingest, search, ask, sessions, trace):
    app.add_command(_command)
