"""Requests to domain objects: every field is checked, all faults of a request are named at once."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2, rag_pb2
from specrag_common.runtime.errors import FieldViolation, InvalidRequest
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_common.wire.proposals import MAX_BRANCHES_PER_SOURCE, MAX_GAMMA, decode_source
from specrag_common.wire.sampling import SamplingOptions, decode_mode, decode_sampling

from specrag_orchestrator.passages import SourcePassage
from specrag_orchestrator.question import AnswerPolicy, DraftOptions, Question

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

MAX_QUESTION_CHARS: Final = 8192
MAX_NUM_PASSAGES: Final = 30
MAX_GIVEN_PASSAGES: Final = 64
MAX_PASSAGE_CHARS: Final = 65_536
MAX_FILTERS: Final = 16
MAX_NUM_DRAFTERS: Final = 16
MAX_REQUEST_ID_CHARS: Final = 128
MAX_TENANT_CHARS: Final = 128
DEFAULT_TENANT: Final = "default"
DEFAULT_PAGE_SIZE: Final = 20
MAX_PAGE_SIZE: Final = 100

_COLLECTION: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_SESSION_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_POLICIES: Final[dict[int, AnswerPolicy]] = {
    rag_pb2.ANSWER_POLICY_UNSPECIFIED: AnswerPolicy.JOINT,
    rag_pb2.ANSWER_POLICY_TARGET_ONLY: AnswerPolicy.TARGET_ONLY,
    rag_pb2.ANSWER_POLICY_JOINT: AnswerPolicy.JOINT,
}


class _Faults:
    """Collects what is wrong with one request."""

    def __init__(self) -> None:
        self.violations: list[FieldViolation] = []

    def add(self, field: str, description: str) -> None:
        self.violations.append(FieldViolation(field, description))

    def check_range(self, field: str, value: int | None, most: int) -> None:
        """Note a present value outside 1 to ``most``."""
        if value is not None and not 1 <= value <= most:
            self.add(field, f"{value} is outside 1 to {most}")

    def collect(self, decode: Callable[[], T], default: T) -> T:
        """Return what ``decode`` returns; note its faults and return ``default`` instead."""
        try:
            return decode()
        except InvalidRequest as exc:
            self.violations.extend(exc.violations)
            return default

    def raise_if_any(self) -> None:
        if self.violations:
            raise InvalidRequest.of(self.violations)


def decode_question(request: rag_pb2.AnswerRequest) -> Question:
    """Return the question of ``request``.

    Raises:
        InvalidRequest: names every field that is missing, malformed or out of range.
    """
    faults = _Faults()
    _check_text(request.question, faults)
    _check_source(request, faults)
    _check_request_id(request.request_id, faults)
    if request.session_id and not _SESSION_ID.fullmatch(request.session_id):
        faults.add("session_id", "must be 1 to 64 of A-Z a-z 0-9 _ -")
    num_passages = request.num_passages if request.HasField("num_passages") else None
    faults.check_range("num_passages", num_passages, MAX_NUM_PASSAGES)
    if request.policy not in _POLICIES:
        faults.add("policy", f"unknown value {request.policy}")
    seed = request.seed if request.HasField("seed") else None
    question = Question(
        text=request.question,
        collection=request.collection,
        tenant=faults.collect(lambda: decode_tenant(request.tenant), DEFAULT_TENANT),
        session_id=request.session_id,
        request_id=request.request_id,
        policy=_POLICIES.get(request.policy, AnswerPolicy.JOINT),
        sampling=faults.collect(lambda: decode_sampling(request.sampling), SamplingOptions()),
        seed=seed,
        mode=faults.collect(lambda: _decode_mode(request.mode, seed), VerificationMode.COUPLED),
        num_passages=num_passages,
        filters=tuple(request.filters),
        draft=_decode_draft_options(request.draft, faults),
        include_speculative=request.include_speculative,
        allow_fallback=request.allow_fallback if request.HasField("allow_fallback") else True,
        given_passages=_decode_given(request, faults),
    )
    _check_sampling_text(question.sampling, faults)
    faults.raise_if_any()
    return question


def decode_tenant(tenant: str) -> str:
    """Return the tenant; empty means the default one.

    Raises:
        InvalidRequest: too long or not printable.
    """
    if len(tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest("tenant", f"{len(tenant)} code points exceed {MAX_TENANT_CHARS}")
    if not tenant.isprintable():
        raise InvalidRequest("tenant", "must not hold control characters")
    return tenant or DEFAULT_TENANT


def decode_session_id(session_id: str) -> str:
    """Return the session id of a request that needs one.

    Raises:
        InvalidRequest: missing or malformed.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest("session_id", "must be 1 to 64 of A-Z a-z 0-9 _ -")
    return session_id


def decode_answer_id(answer_id: str) -> str:
    """Return the answer id of a request that needs one.

    Raises:
        InvalidRequest: missing or too long.
    """
    if not 1 <= len(answer_id) <= MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(
            "answer_id", f"length {len(answer_id)} is outside 1 to {MAX_REQUEST_ID_CHARS}"
        )
    return answer_id


def decode_page_size(request: rag_pb2.GetSessionRequest | rag_pb2.ListSessionsRequest) -> int:
    """Return the page size, the default when absent.

    Raises:
        InvalidRequest: out of range.
    """
    size = request.page_size if request.HasField("page_size") else DEFAULT_PAGE_SIZE
    if not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidRequest("page_size", f"{size} is outside 1 to {MAX_PAGE_SIZE}")
    return size


def _check_text(question: str, faults: _Faults) -> None:
    if not question.strip():
        faults.add("question", "the question is blank")
    elif len(question) > MAX_QUESTION_CHARS:
        faults.add("question", f"{len(question)} code points exceed {MAX_QUESTION_CHARS}")
    if "\x00" in question:
        faults.add("question", "must not hold NUL characters")


def _check_source(request: rag_pb2.AnswerRequest, faults: _Faults) -> None:
    """Either a collection to search, or passages to read; what belongs to the other is refused."""
    if not request.passages:
        if not _COLLECTION.fullmatch(request.collection):
            faults.add("collection", "must match [a-z][a-z0-9_]{0,62} when no passages are given")
        if len(request.filters) > MAX_FILTERS:
            faults.add("filters", f"{len(request.filters)} conditions exceed {MAX_FILTERS}")
        return
    if request.collection:
        faults.add("collection", "must be empty when passages are given")
    if request.filters:
        faults.add("filters", "have no effect on given passages; leave them empty")
    if request.HasField("num_passages"):
        faults.add("num_passages", "has no effect on given passages; leave it unset")


def _check_request_id(request_id: str, faults: _Faults) -> None:
    if len(request_id) > MAX_REQUEST_ID_CHARS:
        faults.add("request_id", f"{len(request_id)} code points exceed {MAX_REQUEST_ID_CHARS}")
    if not request_id.isprintable():
        faults.add("request_id", "must not hold control characters")


def _check_sampling_text(sampling: SamplingOptions, faults: _Faults) -> None:
    for idx, stop in enumerate(sampling.stop):
        if "\x00" in stop:
            faults.add(f"sampling.stop[{idx}]", "must not hold NUL characters")


def _decode_mode(value: int, seed: int | None) -> VerificationMode:
    if value == common_pb2.VERIFICATION_MODE_UNSPECIFIED:
        return VerificationMode.REJECTION if seed is None else VerificationMode.COUPLED
    return decode_mode(value)


def _decode_draft_options(message: rag_pb2.DraftOptions, faults: _Faults) -> DraftOptions:
    num_drafters = message.num_drafters if message.HasField("num_drafters") else None
    max_gamma = message.max_gamma if message.HasField("max_gamma") else None
    num_branches = message.num_branches if message.HasField("num_branches") else None
    faults.check_range("draft.num_drafters", num_drafters, MAX_NUM_DRAFTERS)
    faults.check_range("draft.max_gamma", max_gamma, MAX_GAMMA)
    faults.check_range("draft.num_branches", num_branches, MAX_BRANCHES_PER_SOURCE)
    sources: list[DraftSource] = []
    for idx, value in enumerate(message.sources):
        field = f"draft.sources[{idx}]"
        source = faults.collect(lambda v=value, f=field: decode_source(v, f), DraftSource.SUFFIX)  # type: ignore[misc]
        if source in sources:
            faults.add(field, f"{source} is named twice")
        sources.append(source)
    return DraftOptions(
        num_drafters=num_drafters,
        max_gamma=max_gamma,
        num_branches=num_branches,
        sources=tuple(sources),
    )


def _decode_given(request: rag_pb2.AnswerRequest, faults: _Faults) -> tuple[SourcePassage, ...]:
    if len(request.passages) > MAX_GIVEN_PASSAGES:
        faults.add("passages", f"{len(request.passages)} passages exceed {MAX_GIVEN_PASSAGES}")
        return ()
    for idx, message in enumerate(request.passages):
        _check_given(message, idx, faults)
    return tuple(decode_passage(message) for message in request.passages)


def _check_given(message: common_pb2.Passage, idx: int, faults: _Faults) -> None:
    field = f"passages[{idx}]"
    if not message.text.strip():
        faults.add(f"{field}.text", "the passage is blank")
    if len(message.text) > MAX_PASSAGE_CHARS:
        faults.add(f"{field}.text", f"{len(message.text)} code points exceed {MAX_PASSAGE_CHARS}")
    if "\x00" in message.text or "\x00" in message.title:
        faults.add(field, "must not hold NUL characters")
    if message.start_char < 0:
        faults.add(f"{field}.start_char", f"{message.start_char} is negative")
    if message.number not in (0, idx + 1):
        faults.add(f"{field}.number", f"{message.number}: numbers are assigned here; leave it 0")


def decode_passage(message: common_pb2.Passage, collection: str = "") -> SourcePassage:
    """Return the passage of ``message``, not yet numbered."""
    return SourcePassage(
        chunk_id=message.chunk_id,
        document_id=message.document_id,
        title=message.title,
        uri=message.uri,
        text=message.text,
        start_char=message.start_char,
        end_char=message.end_char or message.start_char + len(message.text),
        score=message.score,
        collection=collection,
        metadata=dict(message.metadata),
    )
