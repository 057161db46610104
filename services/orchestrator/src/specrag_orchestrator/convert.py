"""Domain objects to messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from google.protobuf.timestamp_pb2 import Timestamp
from specrag.v1 import common_pb2, rag_pb2
from specrag_common.wire.arrays import encode_int32
from specrag_common.wire.sampling import encode_mode
from specrag_common.wire.verified import AnswerEnd, encode_end

from specrag_orchestrator.answering.events import Finished, RetrievalDone, TokenLogprobs
from specrag_orchestrator.answering.transcript import Commit, Retract, Speculative
from specrag_orchestrator.answering.turns import restore_citations
from specrag_orchestrator.citations import Citation, CitationMethod
from specrag_orchestrator.conversation import passages_of_session
from specrag_orchestrator.question import AnswerPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from specrag_common.sessions.model import Session, SessionInfo, Turn

    from specrag_orchestrator.answering.events import AnswerEvent
    from specrag_orchestrator.answering.stats import AnswerStats
    from specrag_orchestrator.passages import SourcePassage

_POLICIES: Final = {
    AnswerPolicy.TARGET_ONLY: rag_pb2.ANSWER_POLICY_TARGET_ONLY,
    AnswerPolicy.JOINT: rag_pb2.ANSWER_POLICY_JOINT,
}
_METHODS: Final = {
    CitationMethod.INLINE: rag_pb2.CITATION_METHOD_INLINE,
    CitationMethod.LEXICAL: rag_pb2.CITATION_METHOD_LEXICAL,
}


def encode_event(event: AnswerEvent, seq: int) -> rag_pb2.AnswerResponse:
    """Return the message of one event."""
    message = rag_pb2.AnswerEvent(seq=seq)
    match event:
        case RetrievalDone():
            message.retrieval_done.CopyFrom(_encode_retrieval(event))
        case Speculative(offset=offset, text=text):
            message.speculative.offset = offset
            message.speculative.text = text
        case Retract(to_offset=to_offset):
            message.retract.to_offset = to_offset
        case Commit(to_offset=to_offset, text=text):
            message.commit.to_offset = to_offset
            message.commit.text = text
        case TokenLogprobs():
            message.token_logprobs.CopyFrom(_encode_logprobs(event))
        case Citation():
            message.citation.CopyFrom(encode_citation(event))
        case Finished():
            message.finished.CopyFrom(_encode_finished(event))
    return rag_pb2.AnswerResponse(event=message)


def encode_citation(citation: Citation) -> rag_pb2.Citation:
    """Return the message of one citation."""
    passage = citation.passage
    return rag_pb2.Citation(
        number=passage.number,
        chunk_id=passage.chunk_id,
        document_id=passage.document_id,
        title=passage.title,
        start=citation.start,
        end=citation.end,
        source_start=citation.source_start,
        source_end=citation.source_end,
        support=citation.support,
        method=_METHODS[citation.method],
    )


def encode_session(info: SessionInfo) -> rag_pb2.Session:
    """Return the message of a session without its turns."""
    return rag_pb2.Session(
        session_id=info.key.session_id,
        num_turns=info.num_turns,
        create_time=_encode_time(info.created_at),
        update_time=_encode_time(info.updated_at),
    )


def encode_turns(session: Session, first: int, most: int) -> list[rag_pb2.SessionTurn]:
    """Return the messages of at most ``most`` turns from turn ``first`` on."""
    passages = passages_of_session(session)
    return [_encode_turn(turn, passages) for turn in session.turns[first : first + most]]


def _encode_turn(turn: Turn, passages: Mapping[int, SourcePassage]) -> rag_pb2.SessionTurn:
    end = None if turn.is_partial else AnswerEnd(turn.finish_reason)
    return rag_pb2.SessionTurn(
        question=turn.question,
        answer=turn.answer_text,
        finish_reason=encode_end(end),
        partial=turn.is_partial,
        citations=[encode_citation(one) for one in restore_citations(turn, passages)],
        end_time=_encode_time(turn.finished_at),
        request_id=turn.request_id,
    )


def _encode_retrieval(event: RetrievalDone) -> rag_pb2.RetrievalDone:
    return rag_pb2.RetrievalDone(
        passages=[_encode_passage(passage) for passage in event.passages],
        num_dropped_passages=event.num_dropped_passages,
        num_dropped_turns=event.num_dropped_turns,
        answer_id=event.answer_id,
        trace_id=event.trace_id,
    )


def _encode_passage(passage: SourcePassage) -> common_pb2.Passage:
    return common_pb2.Passage(
        chunk_id=passage.chunk_id,
        document_id=passage.document_id,
        title=passage.title,
        uri=passage.uri,
        text=passage.text,
        start_char=passage.start_char,
        end_char=passage.end_char,
        score=passage.score,
        number=passage.number,
        metadata=dict(passage.metadata),
    )


def _encode_logprobs(event: TokenLogprobs) -> rag_pb2.TokenLogprobs:
    return rag_pb2.TokenLogprobs(
        first_token=event.first_token,
        tokens=[
            rag_pb2.TokenLogprob(
                token_id=token.token_id,
                text=token.text,
                logprob=token.logprob,
                top=[
                    rag_pb2.TopLogprob(token_id=one.token_id, text=one.text, logprob=one.logprob)
                    for one in token.top
                ],
            )
            for token in event.tokens
        ],
    )


def _encode_finished(event: Finished) -> rag_pb2.Finished:
    return rag_pb2.Finished(
        finish_reason=encode_end(event.end),
        policy=_POLICIES[event.policy],
        mode=encode_mode(event.mode),
        degraded=[
            rag_pb2.Degradation(component=one.component, reason=one.reason, detail=one.detail)
            for one in event.degraded
        ],
        usage=rag_pb2.Usage(
            prompt_tokens=event.usage.prompt_tokens,
            cached_tokens=event.usage.cached_tokens,
            completion_tokens=event.usage.completion_tokens,
        ),
        stats=_encode_stats(event.stats),
        session_id=event.session_id,
        answer_id=event.answer_id,
        trace_id=event.trace_id,
        random_key=event.random_key,
        answer=event.text,
        token_ids=encode_int32(event.token_ids),
    )


def _encode_stats(stats: AnswerStats) -> rag_pb2.AnswerStats:
    return rag_pb2.AnswerStats(
        rounds=stats.rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_residual_tokens=stats.num_residual_tokens,
        num_bonus_tokens=stats.num_bonus_tokens,
        mean_acceptance_length=stats.mean_acceptance_length,
        time_to_first_speculative_token_ms=stats.time_to_first_speculative_token_ms,
        time_to_first_token_ms=stats.time_to_first_token_ms,
        total_ms=stats.total_ms,
        tokens_per_s=stats.tokens_per_s,
        retrieval_ms=stats.retrieval_ms,
        prefill_ms=stats.prefill_ms,
        decode_ms=stats.decode_ms,
        num_retracted_chars=stats.num_retracted_chars,
        per_drafter=[
            rag_pb2.DrafterStats(
                drafter_index=one.drafter_index,
                address=one.address,
                passage_numbers=one.passage_numbers,
                num_draft_tokens=one.num_draft_tokens,
                num_accepted_tokens=one.num_accepted_tokens,
                num_late_rounds=one.num_late_rounds,
            )
            for one in stats.per_drafter
        ],
    )


def _encode_time(moment: datetime | None) -> Timestamp | None:
    if moment is None:
        return None
    message = Timestamp()
    message.FromDatetime(moment)
    return message
