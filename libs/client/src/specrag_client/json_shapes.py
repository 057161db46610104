"""The JSON that the command line prints; its keys are a public contract.

:func:`answer_object` is what ``ask --json`` prints, :func:`event_object` one line of
``ask --events``. Times and shares are rounded to what can be meant: 3 places.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from specrag_client import events

if TYPE_CHECKING:
    from specrag_common.runtime.errors import SpecragError

_ANSWER_STATS_KEYS: Final = (
    "rounds",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "time_to_first_speculative_token_ms",
    "time_to_first_token_ms",
    "total_ms",
    "tokens_per_s",
    "per_drafter",
)
_ANSWER_CITATION_KEYS: Final = ("number", "chunk_id", "document_id", "title", "start", "end")


def answer_object(result: events.AnswerResult) -> dict[str, Any]:
    """Return a whole answer as one object."""
    finished = result.finished
    stats = _stats_object(finished.stats)
    return {
        "answer": finished.answer,
        "finish_reason": finished.finish_reason.value,
        "policy": finished.policy.value,
        "mode": finished.mode.value,
        "degraded": [asdict(one) for one in finished.degraded],
        "citations": [
            {key: getattr(one, key) for key in _ANSWER_CITATION_KEYS} for one in result.citations
        ],
        "passages": [passage_object(one) for one in result.passages],
        "num_dropped_passages": result.retrieval.num_dropped_passages,
        "num_dropped_turns": result.retrieval.num_dropped_turns,
        "usage": asdict(finished.usage),
        "stats": {key: stats[key] for key in _ANSWER_STATS_KEYS},
        "session_id": finished.session_id or None,
        "answer_id": finished.answer_id,
        "trace_id": finished.trace_id,
        **({"logprobs": [asdict(one) for one in result.logprobs]} if result.logprobs else {}),
    }


def passage_object(passage: events.Passage) -> dict[str, Any]:
    """Return a passage; the score keeps its full precision, since it orders."""
    return asdict(passage)


def event_object(event: events.AnswerEvent) -> dict[str, Any]:
    """Return one event; ``type`` names its kind."""
    match event:
        case events.RetrievalDone():
            fields = asdict(event)
            kind = "retrieval"
        case events.TokenLogprobs():
            fields = asdict(event)
            kind = "token_logprobs"
        case events.Citation():
            fields = asdict(event) | {"support": round(event.support, 3)}
            kind = "citation"
        case events.Finished():
            fields = _finished_fields(event)
            kind = "finished"
        case _:
            fields = asdict(event)
            kind = type(event).__name__.lower()
    return {"type": kind, **fields}


def error_object(error: SpecragError, *, seq: int) -> dict[str, Any]:
    """Return the last line of a stream that ended by an error."""
    return {
        "type": "error",
        "seq": seq,
        "code": error.status.name,
        "reason": error.reason,
        "message": error.message,
        "retryable": error.retryable,
        "retry_delay_s": error.retry_delay_s,
    }


def _finished_fields(event: events.Finished) -> dict[str, Any]:
    return {
        "seq": event.seq,
        "answer": event.answer,
        "finish_reason": event.finish_reason.value,
        "policy": event.policy.value,
        "mode": event.mode.value,
        "degraded": [asdict(one) for one in event.degraded],
        "usage": asdict(event.usage),
        "stats": _stats_object(event.stats),
        "session_id": event.session_id or None,
        "answer_id": event.answer_id,
        "trace_id": event.trace_id,
        "random_key": event.random_key,
        "token_ids": list(event.token_ids),
    }


def _stats_object(stats: events.AnswerStats) -> dict[str, Any]:
    return {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in asdict(stats).items()
    }
