"""What an answer tells its caller, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping


class Policy(StrEnum):
    """How an answer comes about; the same words as the command line's ``--policy``."""

    JOINT = "joint"
    TARGET_ONLY = "target-only"
    UNSPECIFIED = "unspecified"


class VerificationMode(StrEnum):
    """How the target decided about proposed tokens."""

    REJECTION = "rejection"
    COUPLED = "coupled"
    UNSPECIFIED = "unspecified"


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"
    UNSPECIFIED = "unspecified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A piece of a document.

    Attributes:
        number: citation number, >= 1 in an answer, 0 in a search result.
        chunk_id: identifies the passage in its collection.
        document_id: identifies the document in its collection.
        title: the document's title.
        uri: where the document came from; may be empty.
        text: the passage as found in the document's extracted text.
        start_char: begin in the extracted text, in code points.
        end_char: end (exclusive) in the extracted text, in code points.
        score: higher is better; comparable only within one list.
        metadata: the document's metadata.
    """

    number: int
    chunk_id: str
    document_id: str
    title: str
    uri: str
    text: str
    start_char: int
    end_char: int
    score: float
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Degradation:
    """Something that did not work as asked; the answer's law is unchanged."""

    component: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of the target: read, of these found in the prefix cache, and written."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterStats:
    """What one drafter contributed to an answer; token counts are before merging."""

    drafter_index: int
    address: str
    passage_numbers: tuple[int, ...]
    num_draft_tokens: int
    num_accepted_tokens: int
    num_late_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStats:
    """Speculation and times of one answer; ``None`` where it never happened."""

    rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_residual_tokens: int
    num_bonus_tokens: int
    mean_acceptance_length: float
    time_to_first_speculative_token_ms: float | None
    time_to_first_token_ms: float
    total_ms: float
    tokens_per_s: float
    retrieval_ms: float
    prefill_ms: float
    decode_ms: float
    num_retracted_chars: int
    per_drafter: tuple[DrafterStats, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalDone:
    """The passages the answer rests on, best first."""

    seq: int
    passages: tuple[Passage, ...]
    num_dropped_passages: int
    num_dropped_turns: int
    answer_id: str
    trace_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculative:
    """Text shown at the current end that may still be taken back."""

    seq: int
    offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retract:
    """The shown text ends at ``to_offset`` again."""

    seq: int
    to_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """``text`` stands, from the last commit to ``to_offset``."""

    seq: int
    to_offset: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TopLogprob:
    """A token that might have stood somewhere, alone as text, with its log-probability."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token of the answer.

    Attributes:
        token_id: its id under the target's tokenizer.
        text: the token alone; U+FFFD stands for parts of a code point.
        logprob: natural log of its probability under the target's processed law; at temperature 0
            of that of temperature 1.
        top: the most likely tokens in its place, best first.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of tokens that stand; the first is token ``first_token`` of the answer."""

    seq: int
    first_token: int
    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Citation:
    """A part of the answer rests on a passage.

    Attributes:
        seq: place in the stream.
        number: the passage's number.
        chunk_id: the passage.
        document_id: its document.
        title: the document's title.
        start: begin of the cited part of the answer, in code points.
        end: its end (exclusive).
        source_start: begin of the supporting sentence in the document's extracted text.
        source_end: its end (exclusive).
        support: share of the part's words found in that sentence, 0 to 1.
        method: ``inline`` when the model wrote the number, ``lexical`` when words were matched.
    """

    seq: int
    number: int
    chunk_id: str
    document_id: str
    title: str
    start: int
    end: int
    source_start: int
    source_end: int
    support: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of an answer.

    Attributes:
        seq: place in the stream.
        answer: the whole committed text.
        token_ids: the answer's ids under the target's tokenizer.
        finish_reason: why it ended.
        policy: the policy that really served it.
        mode: the verification mode that really served it.
        degraded: what did not work as asked.
        usage: tokens.
        stats: speculation and times.
        session_id: the session; empty without one.
        answer_id: the answer.
        trace_id: the trace.
        random_key: hex of the 16 bytes that keyed every draw.
    """

    seq: int
    answer: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    policy: Policy
    mode: VerificationMode
    degraded: tuple[Degradation, ...]
    usage: Usage
    stats: AnswerStats
    session_id: str
    answer_id: str
    trace_id: str
    random_key: str


AnswerEvent: TypeAlias = (
    RetrievalDone | Speculative | Retract | Commit | TokenLogprobs | Citation | Finished
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerResult:
    """A whole answer: its end, and what came before.

    Attributes:
        finished: the end.
        retrieval: the passages.
        citations: in answer order.
        logprobs: one entry for each of ``finished.token_ids``; empty unless asked for.
    """

    finished: Finished
    retrieval: RetrievalDone
    citations: tuple[Citation, ...]
    logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def answer(self) -> str:
        """The committed text."""
        return self.finished.answer

    @property
    def passages(self) -> tuple[Passage, ...]:
        """The passages the answer rests on, best first."""
        return self.retrieval.passages
