"""What stands below an answer: its sources and how it came about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from specrag_client.cli.screen_text import cut, one_line
from specrag_client.events import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specrag_client.events import AnswerStats, Citation, Finished, RetrievalDone


def citation_lines(citations: Sequence[Citation], answer: str, width: int) -> list[Text]:
    """Return one line for each cited passage with the first part of the answer that rests on it."""
    lines: list[Text] = []
    seen: set[int] = set()
    for citation in sorted(citations, key=lambda one: (one.number, one.start)):
        if citation.number in seen:
            continue
        seen.add(citation.number)
        source = one_line(f"[{citation.number}] {citation.title} — {citation.document_id}")
        part = one_line(answer[citation.start : citation.end])
        line = Text(cut(source, width), style="bold")
        left = width - line.cell_len - 3
        if part and left >= 8:
            line.append(f" “{cut(part, left)}”", style="not bold dim")
        lines.append(line)
    return lines or [Text("no passage is cited", style="dim")]


def stats_lines(finished: Finished, retrieval: RetrievalDone) -> Iterable[Text]:
    """Return the line of stats, and a line for everything that did not go as asked."""
    yield Text(" · ".join(_facts(finished)), style="cyan")
    yield Text(f"trace {finished.trace_id}", style="dim")
    for note in _notes(finished, retrieval):
        yield Text(one_line(note), style="yellow")


def _facts(finished: Finished) -> list[str]:
    stats = finished.stats
    usage = finished.usage
    facts = [
        f"{finished.policy} ({finished.mode})",
        f"{usage.completion_tokens} tokens in {stats.total_ms / 1000:.1f} s",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"prompt {usage.prompt_tokens} ({usage.cached_tokens} cached)",
    ]
    if stats.time_to_first_speculative_token_ms is not None:
        facts.append(f"first text {stats.time_to_first_speculative_token_ms / 1000:.2f} s")
    facts.append(f"first committed {stats.time_to_first_token_ms / 1000:.2f} s")
    if stats.num_draft_tokens:
        facts.append(_acceptance(stats))
    return facts


def _acceptance(stats: AnswerStats) -> str:
    return (
        f"accepted {stats.num_accepted_tokens} of {stats.num_draft_tokens} draft tokens, "
        f"{stats.mean_acceptance_length:.2f} tokens a round"
    )


def _notes(finished: Finished, retrieval: RetrievalDone) -> Iterable[str]:
    if finished.finish_reason is FinishReason.LENGTH:
        yield "the answer was cut off at the most tokens allowed (--max-tokens)"
    if finished.finish_reason is FinishReason.CONTEXT:
        yield "the answer was cut off because the model's context is full"
    if not retrieval.passages and not retrieval.num_dropped_passages:
        yield "no passage was found: the answer rests on nothing but the model"
    if retrieval.num_dropped_passages:
        yield f"{retrieval.num_dropped_passages} passages did not fit into the model's context"
    if retrieval.num_dropped_turns:
        yield f"{retrieval.num_dropped_turns} oldest turns did not fit into the model's context"
    for one in finished.degraded:
        yield f"degraded: {one.component} {one.reason}: {one.detail}"
