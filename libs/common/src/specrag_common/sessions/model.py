"""What a session remembers. Plain data; JSON in the store, never pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime  # noqa: TC003 - pydantic resolves it
from typing import Final
from urllib.parse import quote

from specrag_common.runtime.errors import InvalidRequest

MAX_ID_CHARS: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKey:
    """Names one session. Two owners may use one id without seeing each other.

    Attributes:
        tenant: whose data it is; never empty.
        subject: who within the tenant; empty without authentication.
        session_id: the caller's name for the session.
    """

    tenant: str
    subject: str = ""
    session_id: str

    def __post_init__(self) -> None:
        """Refuse ids that are empty, too long or not printable.

        Raises:
            InvalidRequest: names the part.
        """
        for name, value, may_be_empty in (
            ("tenant", self.tenant, False),
            ("subject", self.subject, True),
            ("session_id", self.session_id, False),
        ):
            if not value and not may_be_empty:
                raise InvalidRequest(name, "must not be empty")
            if len(value) > MAX_ID_CHARS:
                raise InvalidRequest(name, f"{len(value)} characters exceed {MAX_ID_CHARS}")
            if not value.isprintable():
                raise InvalidRequest(name, "must not hold control characters")

    def owner_tag(self) -> str:
        """Return the hash tag of the owner's own keys, which list the sessions."""
        return "{" + f"{quote(self.tenant, safe='')}/{quote(self.subject, safe='')}" + "}"

    def hash_tag(self) -> str:
        """Return the part all keys of the session share, in braces: one slot in a cluster.

        Every part is percent-encoded, so that no id can reach into another's keys.
        """
        parts = (self.tenant, self.subject, self.session_id)
        return "{" + "/".join(quote(part, safe="") for part in parts) + "}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPassage:
    """One passage as it stood in the prompt.

    Attributes:
        number: global number within the session, from 1; never reused.
        chunk_id: id in the collection.
        document_id: document it belongs to.
        title: of the document.
        text: what the model read.
        start: first code point of ``text`` in the document.
        end: one past the last.
        score: fused retrieval score.
        uri: where the document came from; may be empty.
        metadata: of the document.
    """

    number: int
    chunk_id: str
    document_id: str
    title: str
    text: str
    start: int = 0
    end: int = 0
    score: float = 0.0
    uri: str = ""
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCitation:
    """A place in the answer and the passage it cites.

    Attributes:
        number: global number of the passage.
        chunk_id: id of the passage.
        start: first code point of the cited part of the answer.
        end: one past the last.
        source_start: first code point of the supporting sentence in the document.
        source_end: one past the last.
        support: share of the part's words found in that sentence, 0 to 1.
        method: how it was found; empty when unknown.
    """

    number: int
    chunk_id: str
    start: int
    end: int
    source_start: int = 0
    source_end: int = 0
    support: float = 0.0
    method: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnOutcome:
    """How a turn was served: what a repeat of its events needs beside the text.

    Attributes:
        policy: answer policy that served it.
        mode: verification mode.
        random_key_hex: the key of every draw.
        prompt_tokens: length of the prompt.
        cached_tokens: of these, found in the prefix cache.
        num_dropped_passages: found, but without room in the context.
        num_dropped_turns: oldest turns of the session left out of the prompt.
        draft_lengths: state of the length controller by drafter address.
    """

    policy: str
    mode: str
    random_key_hex: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_dropped_passages: int = 0
    num_dropped_turns: int = 0
    draft_lengths: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One question and what was answered, exactly as later prompts must repeat it.

    Attributes:
        request_id: idempotency key of the caller.
        answer_id: of the answer stream.
        question: as asked.
        passages: those that entered the prompt with this turn, in prompt order.
        repeated_passage_numbers: passages of earlier turns that this turn refers to by number.
        answer_text: the committed text.
        answer_token_ids: the committed tokens by tokenizer fingerprint.
        citations: in answer order.
        finish_reason: why the answer ended.
        is_partial: stopped or cut off before its end.
        started_at: when the question arrived, UTC.
        finished_at: when the answer ended, UTC.
        outcome: how it was served; ``None`` when unknown.
    """

    request_id: str
    answer_id: str
    question: str
    passages: tuple[TurnPassage, ...] = ()
    repeated_passage_numbers: tuple[int, ...] = ()
    answer_text: str
    answer_token_ids: dict[str, tuple[int, ...]] = field(default_factory=dict)
    citations: tuple[TurnCitation, ...] = ()
    finish_reason: str
    is_partial: bool = False
    started_at: datetime
    finished_at: datetime
    outcome: TurnOutcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionInfo:
    """A session without its turns.

    Attributes:
        key: its name.
        collection: the collection its turns were answered from.
        version: rises by one with each turn; 0 means nothing is stored yet.
        next_passage_number: the number the next fresh passage gets.
        num_turns: turns stored.
        num_bytes: bytes of all turns.
        created_at: first turn, UTC; ``None`` while nothing is stored.
        updated_at: last turn, UTC; ``None`` while nothing is stored.
    """

    key: SessionKey
    collection: str
    version: int = 0
    next_passage_number: int = 1
    num_turns: int = 0
    num_bytes: int = 0
    created_at: datetime | None = None
    updated_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A session with its turns, oldest first."""

    info: SessionInfo
    turns: tuple[Turn, ...] = ()

    def find_turn(self, request_id: str) -> Turn | None:
        """Return the turn a request id produced, for a caller that repeats itself."""
        for turn in reversed(self.turns):
            if turn.request_id == request_id:
                return turn
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPage:
    """Some sessions of one owner, the last changed first.

    Attributes:
        sessions: at most as many as asked for.
        next_page_token: asks for what follows; empty at the end.
    """

    sessions: tuple[SessionInfo, ...]
    next_page_token: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What a session may hold and how long it lives without a turn."""

    max_turns: int = 200
    max_session_bytes: int = 8 * 1024 * 1024
    max_turn_bytes: int = 1024 * 1024
    ttl_s: int = 30 * 24 * 3600
