"""An answer as the turn log keeps it, and a kept turn as the events it once was."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import Cancelled, InvalidRequest
from specrag_common.sessions.model import (
    Turn,
    TurnCitation,
    TurnOutcome,
    TurnPassage,
)
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.wire.verified import AnswerEnd

from specrag_orchestrator.answering.events import Finished, RetrievalDone, TokenUsage
from specrag_orchestrator.answering.transcript import Commit
from specrag_orchestrator.citations import Citation, CitationMethod
from specrag_orchestrator.conversation import passages_of_turn
from specrag_orchestrator.question import AnswerPolicy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import datetime

    from specrag_common.sessions.model import Session

    from specrag_orchestrator.answering.draft_memory import DraftMemory
    from specrag_orchestrator.answering.events import AnswerEvent
    from specrag_orchestrator.answering.progress import AnswerProgress
    from specrag_orchestrator.answering.stats import AnswerTally
    from specrag_orchestrator.passages import SourcePassage
    from specrag_orchestrator.question import Question

CUT_OFF = "cut_off"
"""``finish_reason`` of a turn that was stopped or failed before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """What a turn records beside the answer itself.

    Attributes:
        answer_id: the answer.
        fingerprint: the tokenizer of its ids.
        policy: what really served it.
        random_key: the key of every draw.
        started_at: when the question arrived, UTC.
        finished_at: when the answer ended, UTC.
        memory: what the turn tells of the drafters.
    """

    answer_id: str
    fingerprint: str
    policy: AnswerPolicy
    random_key: bytes
    started_at: datetime
    finished_at: datetime
    memory: DraftMemory


def build_turn(
    question: Question, progress: AnswerProgress, facts: TurnFacts, *, max_chars: int | None = None
) -> Turn:
    """Return the turn of an answer.

    Args:
        question: as asked.
        progress: the answer, ended or not.
        facts: what else is recorded.
        max_chars: keep only so much of the committed text: what the caller has seen.
    """
    text = progress.text[:max_chars]
    is_partial = progress.end is None
    new = progress.reading.new_numbers
    return Turn(
        request_id=question.request_id,
        answer_id=facts.answer_id,
        question=question.text,
        passages=tuple(_to_turn(one) for one in _in_prompt_order(progress)),
        repeated_passage_numbers=tuple(
            one.number for one in progress.kept if one.number not in new
        ),
        answer_text=text,
        # Ids are kept only with the whole text: a cut inside a token has no ids of its own.
        answer_token_ids={} if is_partial else {facts.fingerprint: tuple(progress.token_ids)},
        citations=tuple(_cite_turn(one) for one in progress.citations if one.end <= len(text)),
        finish_reason=CUT_OFF if progress.end is None else progress.end,
        is_partial=is_partial,
        started_at=facts.started_at,
        finished_at=facts.finished_at,
        outcome=TurnOutcome(
            policy=facts.policy,
            mode=question.mode,
            random_key_hex=facts.random_key.hex(),
            prompt_tokens=progress.num_prompt_tokens,
            cached_tokens=progress.num_cached_tokens,
            num_dropped_passages=progress.num_dropped_passages,
            num_dropped_turns=progress.num_dropped_turns,
            draft_lengths=facts.memory.to_log(),
        ),
    )


def next_passage_number(session: Session, progress: AnswerProgress) -> int:
    """Return the number the session's next fresh passage gets."""
    new = progress.reading.new_numbers
    used = (one.number for one in progress.kept if one.number in new)
    return max(session.info.next_passage_number, max(used, default=0) + 1)


def require_repeat(turn: Turn, question: Question) -> None:
    """Check that a request id comes back with the question it was first used for.

    Raises:
        InvalidRequest: another question: its caller would be told somebody else's answer.
    """
    if turn.question != question.text:
        raise InvalidRequest(
            "request_id",
            f"{question.request_id!r} was used for another question of this session; "
            "give each question an id of its own",
        )


def replay_turn(session: Session, turn: Turn, *, trace_id: str) -> Iterator[AnswerEvent]:
    """Yield a stored turn's events but the last: the text as one commit, without speculation."""
    passages = passages_of_turn(session, turn)
    yield RetrievalDone(
        passages=passages,
        num_dropped_passages=turn.outcome.num_dropped_passages if turn.outcome else 0,
        num_dropped_turns=turn.outcome.num_dropped_turns if turn.outcome else 0,
        answer_id=turn.answer_id,
        trace_id=trace_id,
    )
    if turn.answer_text:
        yield Commit(to_offset=len(turn.answer_text), text=turn.answer_text)
    yield from restore_citations(turn, {one.number: one for one in passages})


def restore_finished(
    session: Session, turn: Turn, *, trace_id: str, tally: AnswerTally
) -> Finished:
    """Return the last event of a stored turn; its figures are those of the repeat.

    Raises:
        Cancelled: the turn was cut off: it has no end to repeat.
    """
    if turn.is_partial or turn.outcome is None:
        raise Cancelled(
            "the answer of this request was cut off; ask again with another request_id",
            reason="TURN_CUT_OFF",
        )
    token_ids = next(iter(turn.answer_token_ids.values()), ())
    return Finished(
        end=AnswerEnd(turn.finish_reason),
        policy=AnswerPolicy(turn.outcome.policy),
        mode=VerificationMode(turn.outcome.mode),
        degraded=(),
        usage=TokenUsage(
            prompt_tokens=turn.outcome.prompt_tokens,
            cached_tokens=turn.outcome.cached_tokens,
            completion_tokens=len(token_ids),
        ),
        stats=tally.build(num_retracted_chars=0),
        session_id=session.info.key.session_id,
        answer_id=turn.answer_id,
        trace_id=trace_id,
        random_key=bytes.fromhex(turn.outcome.random_key_hex),
        text=turn.answer_text,
        token_ids=token_ids,
    )


def restore_citations(turn: Turn, passages: Mapping[int, SourcePassage]) -> Iterator[Citation]:
    """Yield a stored turn's citations of passages that are still known."""
    for one in turn.citations:
        passage = passages.get(one.number)
        if passage is not None:
            yield Citation(
                passage=passage,
                start=one.start,
                end=one.end,
                source_start=one.source_start,
                source_end=one.source_end,
                support=one.support,
                method=CitationMethod(one.method or CitationMethod.INLINE),
            )


def _in_prompt_order(progress: AnswerProgress) -> Iterator[SourcePassage]:
    """Yield the passages that entered the prompt with this turn, as they stood there."""
    kept = {one.number: one for one in progress.kept}
    for passage in progress.reading.conversation.last.passages:
        if passage.number in kept:
            yield kept[passage.number]


def _to_turn(passage: SourcePassage) -> TurnPassage:
    return TurnPassage(
        number=passage.number,
        chunk_id=passage.chunk_id,
        document_id=passage.document_id,
        title=passage.title,
        text=passage.text,
        start=passage.start_char,
        end=passage.end_char,
        score=passage.score,
        uri=passage.uri,
        metadata=dict(passage.metadata),
    )


def _cite_turn(citation: Citation) -> TurnCitation:
    return TurnCitation(
        number=citation.passage.number,
        chunk_id=citation.passage.chunk_id,
        start=citation.start,
        end=citation.end,
        source_start=citation.source_start,
        source_end=citation.source_end,
        support=citation.support,
        method=citation.method,
    )
