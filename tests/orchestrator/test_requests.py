"""Every field of a question is checked, and all faults are named at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import pytest
from specrag.v1 import common_pb2, rag_pb2, retriever_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_orchestrator.question import AnswerPolicy
from specrag_orchestrator.requests import (
    decode_answer_id,
    decode_page_size,
    decode_question,
    decode_session_id,
    decode_tenant,
)

Change = Callable[[rag_pb2.AnswerRequest], object]


def make(**fields: object) -> rag_pb2.AnswerRequest:
    return rag_pb2.AnswerRequest(**{"question": "Who?", "collection": "docs", **fields})  # type: ignore[arg-type]


def given(**fields: object) -> rag_pb2.AnswerRequest:
    passage = common_pb2.Passage(chunk_id="c", text="t", **fields)  # type: ignore[arg-type]
    return make(collection="", passages=[passage])


def test_defaults_are_filled_in() -> None:
    question = decode_question(make())
    assert question.tenant == "default"
    assert question.policy is AnswerPolicy.JOINT
    assert question.mode is VerificationMode.REJECTION
    assert question.allow_fallback
    assert question.num_passages is None
    assert (question.draft.num_drafters, question.draft.max_gamma) == (None, None)
    assert question.draft.num_branches is None
    assert not question.include_speculative


@pytest.mark.parametrize(
    ("seed", "mode", "expected"),
    [
        (None, common_pb2.VERIFICATION_MODE_UNSPECIFIED, VerificationMode.REJECTION),
        (0, common_pb2.VERIFICATION_MODE_UNSPECIFIED, VerificationMode.COUPLED),
        (5, common_pb2.VERIFICATION_MODE_REJECTION, VerificationMode.REJECTION),
        (None, common_pb2.VERIFICATION_MODE_COUPLED, VerificationMode.COUPLED),
    ],
)
def test_mode_follows_the_seed_unless_stated(
    seed: int | None, mode: int, expected: VerificationMode
) -> None:
    question = decode_question(make(seed=seed, mode=mode))
    assert (question.mode, question.seed) == (expected, seed)


def test_draft_options_are_read() -> None:
    options = rag_pb2.DraftOptions(
        num_drafters=3,
        max_gamma=64,
        num_branches=2,
        sources=[common_pb2.DRAFT_SOURCE_MODEL, common_pb2.DRAFT_SOURCE_SUFFIX],
    )
    draft = decode_question(make(draft=options)).draft
    assert (draft.num_drafters, draft.max_gamma, draft.num_branches) == (3, 64, 2)
    assert draft.sources == (DraftSource.MODEL, DraftSource.SUFFIX)


def test_given_passages_are_read_in_order() -> None:
    (passage,) = decode_question(given(start_char=10, title="T")).given_passages
    assert (passage.start_char, passage.end_char, passage.number) == (10, 11, 0)


UNSPECIFIED = common_pb2.DRAFT_SOURCE_UNSPECIFIED
UNKNOWN = cast("common_pb2.DraftSource.ValueType", 77)
SUFFIX = common_pb2.DRAFT_SOURCE_SUFFIX

BAD: list[tuple[str, Change]] = [
    ("question", lambda r: setattr(r, "question", "")),
    ("question", lambda r: setattr(r, "question", " \n\u3000")),
    ("question", lambda r: setattr(r, "question", "x" * 8193)),
    ("question", lambda r: setattr(r, "question", "a\x00b")),
    ("collection", lambda r: setattr(r, "collection", "")),
    ("collection", lambda r: setattr(r, "collection", "No Such")),
    ("tenant", lambda r: setattr(r, "tenant", "t" * 129)),
    ("tenant", lambda r: setattr(r, "tenant", "a\nb")),
    ("session_id", lambda r: setattr(r, "session_id", "a b")),
    ("session_id", lambda r: setattr(r, "session_id", "s" * 65)),
    ("request_id", lambda r: setattr(r, "request_id", "r" * 129)),
    ("request_id", lambda r: setattr(r, "request_id", "a\x00")),
    ("policy", lambda r: setattr(r, "policy", 99)),
    ("mode", lambda r: setattr(r, "mode", 99)),
    ("num_passages", lambda r: setattr(r, "num_passages", 0)),
    ("num_passages", lambda r: setattr(r, "num_passages", -1)),
    ("num_passages", lambda r: setattr(r, "num_passages", 31)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", -0.1)),
    ("sampling.temperature", lambda r: setattr(r.sampling, "temperature", math.nan)),
    ("sampling.top_p", lambda r: setattr(r.sampling, "top_p", 0.0)),
    ("sampling.top_k", lambda r: setattr(r.sampling, "top_k", -1)),
    ("sampling.max_tokens", lambda r: setattr(r.sampling, "max_tokens", 0)),
    ("sampling.max_tokens", lambda r: setattr(r.sampling, "max_tokens", 4097)),
    ("sampling.stop", lambda r: r.sampling.stop.extend("abcdefghi")),
    ("sampling.stop[0]", lambda r: r.sampling.stop.append("")),
    ("sampling.stop[0]", lambda r: r.sampling.stop.append("\x00")),
    ("draft.num_drafters", lambda r: setattr(r.draft, "num_drafters", 0)),
    ("draft.num_drafters", lambda r: setattr(r.draft, "num_drafters", 17)),
    ("draft.max_gamma", lambda r: setattr(r.draft, "max_gamma", 65)),
    ("draft.num_branches", lambda r: setattr(r.draft, "num_branches", 9)),
    ("draft.sources[0]", lambda r: r.draft.sources.append(UNSPECIFIED)),
    ("draft.sources[0]", lambda r: r.draft.sources.append(UNKNOWN)),
    ("draft.sources[1]", lambda r: r.draft.sources.extend([SUFFIX, SUFFIX])),
    ("filters", lambda r: r.filters.extend([retriever_pb2.FilterCondition()] * 17)),
]


@pytest.mark.parametrize(("field", "change"), BAD)
def test_bad_field_is_named(field: str, change: Change) -> None:
    request = make()
    change(request)
    with pytest.raises(InvalidRequest) as caught:
        decode_question(request)
    assert [one.field for one in caught.value.violations] == [field]


BAD_GIVEN: list[tuple[str, Change]] = [
    ("collection", lambda r: setattr(r, "collection", "docs")),
    ("num_passages", lambda r: setattr(r, "num_passages", 3)),
    ("filters", lambda r: r.filters.append(retriever_pb2.FilterCondition())),
    ("passages", lambda r: r.passages.extend([common_pb2.Passage(text="t")] * 64)),
    ("passages[0].text", lambda r: setattr(r.passages[0], "text", " ")),
    ("passages[0].text", lambda r: setattr(r.passages[0], "text", "x" * 65_537)),
    ("passages[0]", lambda r: setattr(r.passages[0], "title", "\x00")),
    ("passages[0].start_char", lambda r: setattr(r.passages[0], "start_char", -1)),
    ("passages[0].number", lambda r: setattr(r.passages[0], "number", 5)),
]


@pytest.mark.parametrize(("field", "change"), BAD_GIVEN)
def test_bad_given_passage_is_named(field: str, change: Change) -> None:
    request = given()
    change(request)
    with pytest.raises(InvalidRequest) as caught:
        decode_question(request)
    assert [one.field for one in caught.value.violations] == [field]


def test_all_faults_are_named_at_once() -> None:
    request = make(question=" ", num_passages=99, policy=9)
    request.sampling.top_p = 2.0
    with pytest.raises(InvalidRequest) as caught:
        decode_question(request)
    fields = {one.field for one in caught.value.violations}
    assert fields == {"question", "num_passages", "policy", "sampling.top_p"}


@pytest.mark.parametrize(
    ("decode", "value"),
    [
        (decode_tenant, "\x07"),
        (decode_session_id, ""),
        (decode_session_id, "a/b"),
        (decode_answer_id, ""),
        (decode_answer_id, "x" * 129),
        (decode_page_size, rag_pb2.GetSessionRequest(page_size=0)),
        (decode_page_size, rag_pb2.ListSessionsRequest(page_size=101)),
    ],
)
def test_bad_field_of_a_session_request_is_refused(
    decode: Callable[[object], object], value: object
) -> None:
    with pytest.raises(InvalidRequest):
        decode(value)
