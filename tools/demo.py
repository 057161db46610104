"""The demonstration behind ``make demo``: a whole stack, the handbook, a few questions, one trace.

Exit code 0 only if every answer finished, a citation points to a document that holds the answer,
and one trace spans all four services. Everything is stopped at the end, whatever happens.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from specrag_client.cli.answer_summary import citation_lines, stats_lines
from specrag_client.cli.failure import CommandError, print_error
from specrag_client.cli.running import run_async
from specrag_client.cli.stack_progress import StackProgress
from specrag_client.cli.terminal_view import TerminalView
from specrag_client.client import AnswerCollector, AnswerOptions, SpecragClient
from specrag_client.discovery import discover
from specrag_client.documents import DocumentsClient
from specrag_client.events import AnswerResult, Commit, Retract, Speculative
from specrag_client.ingestion import IngestionReport, ingest_files
from specrag_client.stack.launcher import StackLauncher
from specrag_client.stack.layout import StackFolder
from specrag_client.stack.options import StackOptions
from specrag_client.stack.processes import StackError
from specrag_client.stack.state import StackBusyError, holding_folder, stop_stack
from specrag_client.trace_tree import SpanNode, read_trace, services_of, tree_lines
from specrag_common.runtime.errors import SpecragError

if TYPE_CHECKING:
    from types import TracebackType

    from specrag_client.cli.answer_views import AnswerView
    from specrag_client.events import AnswerEvent
    from specrag_client.stack.record import StackRecord

ROOT = Path(__file__).parents[1]
HANDBOOK = ROOT / "examples" / "handbook"
DIRECTORY = Path(".specrag") / "demo"
COLLECTION = "handbook"
SERVICES = {"orchestrator", "retriever", "verifier", "drafter"}
NUM_FURTHER_QUESTIONS = 3
BRIEF = r"--stop '\n'"
"""The small bundled model rarely ends its answer after the sentence that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question with accepted answers and the files that hold them."""

    id: str
    question: str
    answers: tuple[str, ...]
    files: tuple[str, ...]
    follow_up_of: str | None


@dataclass(slots=True)
class Verdict:
    """What the demonstration has shown so far."""

    num_asked: int = 0
    num_finished: int = 0
    num_as_expected: int = 0
    num_gold_citations: int = 0
    services: set[str] = field(default_factory=set)

    @property
    def is_good(self) -> bool:
        """Whether everything that must be shown was shown."""
        all_finished = self.num_finished == self.num_asked > 0
        return all_finished and self.num_gold_citations > 0 and self.services >= SERVICES


def main() -> int:
    """Run the demonstration and return its exit code."""
    started = time.monotonic()
    verdict = Verdict()
    try:
        with holding_folder(DIRECTORY):
            run_async(demonstrate(verdict))
    except (CommandError, StackBusyError, SpecragError) as exc:
        print_error(str(exc))
        return 3
    except StackError as exc:
        print(exc.log_tail, file=sys.stderr)
        print_error(str(exc))
        return 3
    conclude(verdict, time.monotonic() - started)
    return 0 if verdict.is_good else 1


async def demonstrate(verdict: Verdict) -> None:
    """Start a stack, ingest, ask, show a trace, stop the stack."""
    await stop_stack(DIRECTORY)
    forget_last_run()
    step("Starting a stack: Redis, Milvus Lite, retriever, verifier, two drafters, orchestrator")
    with StackProgress() as progress:
        launcher = StackLauncher(
            StackOptions(directory=DIRECTORY, foreground=True), progress.report
        )
        record = await launcher.start()
    try:
        print(f"Ready; questions go to {record.endpoint}.")
        await ingest(record)
        results = await ask_all(record, load_questions(), verdict)
        await show_trace(results[-1].finished.trace_id, verdict)
    finally:
        step("Stopping everything")
        await launcher.stop()


def forget_last_run() -> None:
    """Delete the stores of an earlier demonstration, so that each run shows the same."""
    folder = StackFolder.at(DIRECTORY)
    for path in (folder.milvus_data, folder.redis_data):
        shutil.rmtree(path, ignore_errors=True)


async def ingest(record: StackRecord) -> None:
    """Add the handbook's documents."""
    step(f"specrag ingest examples/handbook/docs --collection {COLLECTION}")
    report = IngestionReport()
    found = discover([HANDBOOK / "docs"])
    async with DocumentsClient(record.retriever) as client:
        await client.ensure_collection(COLLECTION)
        async for progress in ingest_files(client, found, collection=COLLECTION):
            report = progress
    print(
        f"{report.num_indexed} documents indexed in {report.num_passages} passages, "
        f"{report.num_unchanged} unchanged, {len(report.skipped)} skipped."
    )


def load_questions() -> list[Question]:
    """Return a question, its follow-up, and further ones from other files."""
    lines = (HANDBOOK / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    by_id = {one["id"]: one for one in entries}
    shown = [one for one in entries if one["demo"]]
    follow_up = next(one for one in shown if one.get("follow_up_of"))
    chosen = [by_id[follow_up["follow_up_of"]], follow_up]
    for entry in shown:
        files = {name for one in chosen for name in one["files"]}
        if len(chosen) < 2 + NUM_FURTHER_QUESTIONS and not files & set(entry["files"]):
            chosen.append(entry)
    return [
        Question(
            id=one["id"],
            question=one["question"],
            answers=tuple(one["answers"]),
            files=tuple(one["files"]),
            follow_up_of=one.get("follow_up_of"),
        )
        for one in chosen
    ]


async def ask_all(
    record: StackRecord, questions: list[Question], verdict: Verdict
) -> list[AnswerResult]:
    """Ask every question, streaming; a follow-up goes into the session of what it follows."""
    session_id = f"demo-{uuid4().hex[:8]}"
    first_turns = {one.follow_up_of for one in questions}
    results = []
    async with SpecragClient(record.endpoint) as client:
        for question in questions:
            in_session = question.follow_up_of is not None or question.id in first_turns
            flag = f" --session {session_id}" if in_session else ""
            step(f'specrag ask "{question.question}" --collection {COLLECTION} {BRIEF}{flag}')
            verdict.num_asked += 1
            result = await ask(client, question, session_id if in_session else "")
            results.append(result)
            judge(question, result, verdict)
    return results


async def ask(client: SpecragClient, question: Question, session_id: str) -> AnswerResult:
    """Ask one question and show its answer as it comes."""
    collector = AnswerCollector()
    options = AnswerOptions(session_id=session_id, max_tokens=64, stop=("\n",))
    stream = client.answer(question.question, collection=COLLECTION, options=options)
    is_screen = sys.stdout.isatty() and not TerminalView.is_dumb()
    view: AnswerView = TerminalView() if is_screen else TranscriptView()
    async with aclosing(stream):
        with view:
            async for event in stream:
                collector.add(event)
                view.show(event)
    return collector.result()


def judge(question: Question, result: AnswerResult, verdict: Verdict) -> None:
    """Hold an answer against what was expected, and say so."""
    verdict.num_finished += 1
    cited = {one.document_id for one in result.citations}
    gold = sorted(cited & set(question.files))
    verdict.num_gold_citations += len(gold)
    answer = result.answer.casefold()
    right = any(one.casefold() in answer for one in question.answers)
    verdict.num_as_expected += right
    expected = " or ".join(f"“{one}”" for one in question.answers)
    outcome = "as expected" if right else f"not as expected, which is {expected}"
    source = f"cites {gold[0]}, which says so" if gold else f"does not cite {question.files[0]}"
    print(f"→ {outcome}; {source}.")


async def show_trace(trace_id: str, verdict: Verdict) -> None:
    """Draw the last answer's trace; spans reach the files about a second after they end."""
    step(f"specrag trace {trace_id}")
    folder = StackFolder.at(DIRECTORY).traces
    roots: list[SpanNode] = []
    num_spans = -1
    deadline = time.monotonic() + 10
    while num_spans != count_spans(roots) and time.monotonic() < deadline:
        num_spans = count_spans(roots)
        await asyncio.sleep(1.5)
        roots = read_trace(folder, trace_id)
    verdict.services = services_of(roots)
    for line in tree_lines(roots):
        print(line)
    print(
        f"One trace across {len(verdict.services)} services: {', '.join(sorted(verdict.services))}."
    )


def count_spans(roots: list[SpanNode]) -> int:
    """Return how many spans a trace has so far."""
    return sum(1 for root in roots for _ in root.walk())


def conclude(verdict: Verdict, seconds: float) -> None:
    """Say what was shown, and what to try next."""
    step(f"Done in {seconds:.0f} s; nothing is left running")
    print(
        f"{verdict.num_as_expected} of {verdict.num_asked} answers as expected, "
        f"{verdict.num_gold_citations} citations of a document that holds the answer.\n"
    )
    print("Try next:")
    where = f"--dir {DIRECTORY}"
    for command in (
        f"specrag up --detach {where}",
        f'specrag ask "Who runs the bicycle scheme?" --collection {COLLECTION} {BRIEF} {where}',
        f"specrag ingest YOUR_FOLDER --collection mine {where}",
        f"specrag down {where}",
    ):
        print(f"  .venv/bin/{command}")


def step(title: str) -> None:
    """Print what comes next."""
    print(f"\n== {title}", flush=True)


class TranscriptView:
    """Streams an answer where there is no screen: text, how it was speculated, then its facts."""

    wants_speculative = True

    def __init__(self) -> None:
        """Begin with nothing."""
        self._collector = AnswerCollector()
        self._num_guesses = 0
        self._num_retracts = 0

    def __enter__(self) -> Self:
        return self

    def show(self, event: AnswerEvent) -> None:
        """Print what stands; count what was shown early and what was taken back."""
        self._collector.add(event)
        match event:
            case Speculative():
                self._num_guesses += 1
            case Retract():
                self._num_retracts += 1
            case Commit():
                print(event.text, end="", flush=True)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        print()
        if exc_type is not None:
            return
        result = self._collector.result()
        print(
            f"({self._num_guesses} pieces were shown before they were decided, "
            f"{self._num_retracts} times some were taken back)"
        )
        for line in citation_lines(result.citations, result.answer, 98):
            print(line.plain)
        for line in stats_lines(result.finished, result.retrieval):
            print(line.plain)


if __name__ == "__main__":
    raise SystemExit(main())
