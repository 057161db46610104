"""``specrag ingest`` and ``specrag search``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from specrag_common.runtime.errors import SpecragError, Unsupported

from specrag_client.cli.failure import CommandError, exit_code_of, line_of
from specrag_client.cli.output import print_json
from specrag_client.cli.parameters import (
    FilePathType,
    TextType,
    collection_option,
    json_option,
    retriever_option,
    target_options,
    tenant_option,
)
from specrag_client.cli.running import run_async
from specrag_client.cli.screen_text import cut, one_line
from specrag_client.cli.target import retriever_address
from specrag_client.discovery import DiscoveryError, discover
from specrag_client.documents import DocumentsClient
from specrag_client.ingestion import IngestionReport, ingest_files
from specrag_client.json_shapes import passage_object

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from specrag_client.discovery import Discovery
    from specrag_client.events import Passage

_SNIPPET_CELLS: Final = 240


@click.command()
@click.argument("paths", nargs=-1, required=True, type=FilePathType(path_type=Path))
@collection_option
@tenant_option
@json_option
@retriever_option
@target_options
def ingest(
    paths: tuple[Path, ...],
    collection: str,
    tenant: str | None,
    directory: Path,
    endpoint: str | None,
    retriever: str | None,
    *,
    as_json: bool,
) -> None:
    """Add the documents under PATHS to a collection, which is created if it is missing.

    A document's id is its path below the folder named, or the file's name; ingesting it again
    replaces it.
    """
    try:
        discovery = discover(paths)
    except DiscoveryError as exc:
        raise click.UsageError(str(exc)) from exc
    address = retriever_address(directory, endpoint, retriever)
    started = time.monotonic()
    report = run_async(_ingest(address, discovery, collection, tenant or ""))
    seconds = time.monotonic() - started
    if as_json:
        print_json(_summary(report, collection, tenant, seconds), sys.stdout, indent=2)
    else:
        _print_summary(report, collection, seconds)


@click.command()
@click.argument("query", type=TextType())
@collection_option
@click.option("--top-n", "top_k", type=click.IntRange(1, 100), help="Most passages.")
@tenant_option
@json_option
@retriever_option
@target_options
def search(
    query: str,
    collection: str,
    top_k: int | None,
    tenant: str | None,
    directory: Path,
    endpoint: str | None,
    retriever: str | None,
    *,
    as_json: bool,
) -> None:
    """Find the passages nearest to QUERY."""
    address = retriever_address(directory, endpoint, retriever)
    passages = run_async(_search(address, query, collection, tenant or "", top_k))
    if as_json:
        print_json(
            {
                "query": query,
                "collection": collection,
                "passages": [passage_object(one) for one in passages],
            },
            sys.stdout,
            indent=2,
        )
    else:
        _print_passages(passages)


async def _search(
    address: str, query: str, collection: str, tenant: str, top_k: int | None
) -> Sequence[Passage]:
    async with DocumentsClient(address) as client:
        try:
            return await client.search(query, collection=collection, tenant=tenant, top_k=top_k)
        except Unsupported as exc:
            raise _no_documents_here(address) from exc


async def _ingest(
    address: str, discovery: Discovery, collection: str, tenant: str
) -> IngestionReport:
    report = IngestionReport()
    async with DocumentsClient(address) as client:
        try:
            await client.ensure_collection(collection)
        except Unsupported as exc:
            raise _no_documents_here(address) from exc
        with _progress() as progress:
            total = len(discovery.files) + len(discovery.skipped)
            task = progress.add_task("ingesting", total=total, rate="")
            try:
                async for report in ingest_files(
                    client, discovery, collection=collection, tenant=tenant
                ):
                    elapsed = progress.tasks[task].elapsed or 0.0
                    rate = report.num_documents / elapsed if elapsed > 0 else 0.0
                    progress.update(
                        task, completed=report.num_documents, rate=f"{rate:.1f} documents/s"
                    )
            except SpecragError as exc:
                done = report.num_documents
                raise CommandError(
                    f"after {done} of {total} documents: {line_of(exc)}",
                    exit_code=exit_code_of(exc),
                ) from exc
    return report


def _no_documents_here(address: str) -> CommandError:
    return CommandError(
        f"{address} does not serve documents; name the retriever with --retriever HOST:PORT",
        exit_code=2,
    )


def _progress() -> Progress:
    """Return a bar on stderr; nothing is drawn where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal or console.is_dumb_terminal,
    )


def _summary(
    report: IngestionReport, collection: str, tenant: str | None, seconds: float
) -> dict[str, Any]:
    return {
        "collection": collection,
        "tenant": tenant or "default",
        "num_documents": report.num_documents,
        "num_indexed": report.num_indexed,
        "num_unchanged": report.num_unchanged,
        "num_skipped": len(report.skipped),
        "num_passages": report.num_passages,
        "num_bytes": report.num_bytes,
        "seconds": round(seconds, 3),
        "skipped": [asdict(one) for one in report.skipped],
        "repaired": [{"document_id": name, "detail": detail} for name, detail in report.repaired],
    }


def _print_summary(report: IngestionReport, collection: str, seconds: float) -> None:
    click.echo(
        f"{report.num_indexed} indexed ({report.num_passages} passages), "
        f"{report.num_unchanged} unchanged, {len(report.skipped)} skipped "
        f"in {seconds:.1f} s; collection {collection}"
    )
    for one in report.skipped:
        detail = f": {one_line(one.detail)}" if one.detail else ""
        click.echo(f"  skipped {one_line(one.document_id)} — {one.reason}{detail}")
    for document_id, detail in report.repaired:
        click.echo(f"  repaired {one_line(document_id)}: {one_line(detail)}")


def _print_passages(passages: Sequence[Passage]) -> None:
    if not passages:
        click.echo("nothing found")
        return
    console = Console(highlight=False)
    for rank, passage in enumerate(passages, start=1):
        heading = one_line(f"{rank}. {passage.title} — {passage.document_id}")
        line = Text(heading, style="bold")
        line.append(f"  score {passage.score:.4f}", style="not bold dim")
        console.print(line, soft_wrap=True)
        console.print(Text("   " + cut(one_line(passage.text), _SNIPPET_CELLS)), soft_wrap=True)
