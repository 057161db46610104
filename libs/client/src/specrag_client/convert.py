"""Messages of the wire to the client's plain values."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2, rag_pb2

from specrag_client import events
from specrag_client.events import FinishReason, Policy, VerificationMode

if TYPE_CHECKING:
    from collections.abc import Mapping

WIRE_POLICIES: Final[Mapping[Policy, rag_pb2.AnswerPolicy.ValueType]] = {
    Policy.JOINT: rag_pb2.ANSWER_POLICY_JOINT,
    Policy.TARGET_ONLY: rag_pb2.ANSWER_POLICY_TARGET_ONLY,
    Policy.UNSPECIFIED: rag_pb2.ANSWER_POLICY_UNSPECIFIED,
}
WIRE_MODES: Final[Mapping[VerificationMode, common_pb2.VerificationMode.ValueType]] = {
    VerificationMode.REJECTION: common_pb2.VERIFICATION_MODE_REJECTION,
    VerificationMode.COUPLED: common_pb2.VERIFICATION_MODE_COUPLED,
    VerificationMode.UNSPECIFIED: common_pb2.VERIFICATION_MODE_UNSPECIFIED,
}
_POLICIES: Final[Mapping[rag_pb2.AnswerPolicy.ValueType, Policy]] = {
    wire: plain for plain, wire in WIRE_POLICIES.items()
}
_MODES: Final[Mapping[common_pb2.VerificationMode.ValueType, VerificationMode]] = {
    wire: plain for plain, wire in WIRE_MODES.items()
}
_FINISH_REASONS: Final[Mapping[common_pb2.FinishReason.ValueType, FinishReason]] = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CONTEXT: FinishReason.CONTEXT,
}
_METHODS: Final[Mapping[rag_pb2.CitationMethod.ValueType, str]] = {
    rag_pb2.CITATION_METHOD_INLINE: "inline",
    rag_pb2.CITATION_METHOD_LEXICAL: "lexical",
}


def to_event(wire: rag_pb2.AnswerEvent) -> events.AnswerEvent | None:
    """Return the event, or ``None`` for a kind that this client does not know."""
    event: events.AnswerEvent | None = None
    match wire.WhichOneof("event"):
        case "retrieval_done":
            event = _retrieval(wire.seq, wire.retrieval_done)
        case "speculative":
            one = wire.speculative
            event = events.Speculative(seq=wire.seq, offset=one.offset, text=one.text)
        case "retract":
            event = events.Retract(seq=wire.seq, to_offset=wire.retract.to_offset)
        case "commit":
            commit = wire.commit
            event = events.Commit(seq=wire.seq, to_offset=commit.to_offset, text=commit.text)
        case "token_logprobs":
            event = _token_logprobs(wire.seq, wire.token_logprobs)
        case "citation":
            event = to_citation(wire.citation, seq=wire.seq)
        case "finished":
            event = _finished(wire.seq, wire.finished)
    return event


def to_passage(wire: common_pb2.Passage) -> events.Passage:
    """Return a passage without its embedding."""
    return events.Passage(
        number=wire.number,
        chunk_id=wire.chunk_id,
        document_id=wire.document_id,
        title=wire.title,
        uri=wire.uri,
        text=wire.text,
        start_char=wire.start_char,
        end_char=wire.end_char,
        score=wire.score,
        metadata=dict(wire.metadata),
    )


def to_citation(wire: rag_pb2.Citation, *, seq: int = 0) -> events.Citation:
    """Return a citation; ``seq`` is 0 for those of a stored turn."""
    return events.Citation(
        seq=seq,
        number=wire.number,
        chunk_id=wire.chunk_id,
        document_id=wire.document_id,
        title=wire.title,
        start=wire.start,
        end=wire.end,
        source_start=wire.source_start,
        source_end=wire.source_end,
        support=wire.support,
        method=_METHODS.get(wire.method, "unspecified"),
    )


def to_finish_reason(wire: common_pb2.FinishReason.ValueType) -> FinishReason:
    """Return why an answer ended."""
    return _FINISH_REASONS.get(wire, FinishReason.UNSPECIFIED)


def _retrieval(seq: int, wire: rag_pb2.RetrievalDone) -> events.RetrievalDone:
    return events.RetrievalDone(
        seq=seq,
        passages=tuple(map(to_passage, wire.passages)),
        num_dropped_passages=wire.num_dropped_passages,
        num_dropped_turns=wire.num_dropped_turns,
        answer_id=wire.answer_id,
        trace_id=wire.trace_id,
    )


def _token_logprobs(seq: int, wire: rag_pb2.TokenLogprobs) -> events.TokenLogprobs:
    return events.TokenLogprobs(
        seq=seq,
        first_token=wire.first_token,
        tokens=tuple(
            events.TokenLogprob(
                token_id=token.token_id,
                text=token.text,
                logprob=token.logprob,
                top=tuple(
                    events.TopLogprob(token_id=one.token_id, text=one.text, logprob=one.logprob)
                    for one in token.top
                ),
            )
            for token in wire.tokens
        ),
    )


def _finished(seq: int, wire: rag_pb2.Finished) -> events.Finished:
    num_tokens = len(wire.token_ids) // 4
    return events.Finished(
        seq=seq,
        answer=wire.answer,
        token_ids=struct.unpack(f"<{num_tokens}i", wire.token_ids[: num_tokens * 4]),
        finish_reason=to_finish_reason(wire.finish_reason),
        policy=_POLICIES.get(wire.policy, Policy.UNSPECIFIED),
        mode=_MODES.get(wire.mode, VerificationMode.UNSPECIFIED),
        degraded=tuple(
            events.Degradation(component=one.component, reason=one.reason, detail=one.detail)
            for one in wire.degraded
        ),
        usage=events.Usage(
            prompt_tokens=wire.usage.prompt_tokens,
            cached_tokens=wire.usage.cached_tokens,
            completion_tokens=wire.usage.completion_tokens,
        ),
        stats=_stats(wire.stats),
        session_id=wire.session_id,
        answer_id=wire.answer_id,
        trace_id=wire.trace_id,
        random_key=wire.random_key.hex(),
    )


def _stats(wire: rag_pb2.AnswerStats) -> events.AnswerStats:
    return events.AnswerStats(
        rounds=wire.rounds,
        num_draft_tokens=wire.num_draft_tokens,
        num_accepted_tokens=wire.num_accepted_tokens,
        num_residual_tokens=wire.num_residual_tokens,
        num_bonus_tokens=wire.num_bonus_tokens,
        mean_acceptance_length=wire.mean_acceptance_length,
        time_to_first_speculative_token_ms=wire.time_to_first_speculative_token_ms or None,
        time_to_first_token_ms=wire.time_to_first_token_ms,
        total_ms=wire.total_ms,
        tokens_per_s=wire.tokens_per_s,
        retrieval_ms=wire.retrieval_ms,
        prefill_ms=wire.prefill_ms,
        decode_ms=wire.decode_ms,
        num_retracted_chars=wire.num_retracted_chars,
        per_drafter=tuple(map(_drafter_stats, wire.per_drafter)),
    )


def _drafter_stats(wire: rag_pb2.DrafterStats) -> events.DrafterStats:
    return events.DrafterStats(
        drafter_index=wire.drafter_index,
        address=wire.address,
        passage_numbers=tuple(wire.passage_numbers),
        num_draft_tokens=wire.num_draft_tokens,
        num_accepted_tokens=wire.num_accepted_tokens,
        num_late_rounds=wire.num_late_rounds,
    )
