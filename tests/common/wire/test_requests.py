from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from specrag.v1 import common_pb2
from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.wire.conversations import decode_conversation, encode_conversation
from specrag_common.wire.rounds import RoundKey
from specrag_common.wire.sampling import (
    SamplingOptions,
    check_random_key,
    decode_mode,
    decode_sampling,
    encode_mode,
    encode_sampling,
)
from specrag_common.wire.verified import (
    AnswerEnd,
    TopTokens,
    VerifiedTokens,
    decode_verified,
    encode_verified,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def test_absent_sampling_fields_take_the_defaults_of_the_contract() -> None:
    assert decode_sampling(common_pb2.SamplingParams()) == SamplingOptions(
        temperature=0.0, top_p=1.0, top_k=0, max_tokens=256, stop=()
    )


def test_sampling_survives_the_round_trip() -> None:
    options = SamplingOptions(temperature=0.5, top_p=0.75, top_k=3, max_tokens=9, stop=("a", "b"))

    assert decode_sampling(encode_sampling(options)) == options


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("sampling.temperature", common_pb2.SamplingParams(temperature=-0.1)),
        ("sampling.temperature", common_pb2.SamplingParams(temperature=2.1)),
        ("sampling.temperature", common_pb2.SamplingParams(temperature=float("nan"))),
        ("sampling.top_p", common_pb2.SamplingParams(top_p=0)),
        ("sampling.top_p", common_pb2.SamplingParams(top_p=1.5)),
        ("sampling.top_p", common_pb2.SamplingParams(top_p=float("inf"))),
        ("sampling.top_k", common_pb2.SamplingParams(top_k=-1)),
        ("sampling.max_tokens", common_pb2.SamplingParams(max_tokens=0)),
        ("sampling.max_tokens", common_pb2.SamplingParams(max_tokens=4097)),
        ("sampling.stop", common_pb2.SamplingParams(stop=["x"] * 9)),
        ("sampling.stop[1]", common_pb2.SamplingParams(stop=["x", ""])),
        ("sampling.stop[0]", common_pb2.SamplingParams(stop=["x" * 65])),
    ],
)
def test_decode_sampling_names_the_field_out_of_range(
    field: str, message: common_pb2.SamplingParams
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_sampling(message)

    assert [violation.field for violation in caught.value.violations] == [field]


def test_decode_sampling_reports_every_fault_at_once() -> None:
    message = common_pb2.SamplingParams(temperature=9, top_p=2, max_tokens=-5)

    with pytest.raises(InvalidRequest) as caught:
        decode_sampling(message)

    assert [violation.field for violation in caught.value.violations] == [
        "sampling.temperature",
        "sampling.top_p",
        "sampling.max_tokens",
    ]


def test_mode_is_always_stated_between_services() -> None:
    assert [decode_mode(encode_mode(mode)) for mode in VerificationMode] == list(VerificationMode)
    with pytest.raises(InvalidRequest, match="unspecified or unknown value 0"):
        decode_mode(common_pb2.VERIFICATION_MODE_UNSPECIFIED)


@pytest.mark.parametrize("length", [0, 15, 17])
def test_random_key_has_16_bytes(length: int) -> None:
    with pytest.raises(InvalidRequest, match=f"random_key: {length} bytes, need 16"):
        check_random_key(bytes(length))


def conversation() -> Conversation:
    passages = (
        PromptPassage(number=1, title="One", text="first"),
        PromptPassage(number=2, title="", text="second"),
    )
    return Conversation(
        turns=(
            ConversationTurn(
                passages=passages,
                question="Who?",
                answer="Ann.",
                answer_token_ids={"fp": (4, 5)},
            ),
            ConversationTurn(passages=(), question="And who approves it?"),
        )
    )


def test_conversation_survives_the_round_trip() -> None:
    assert decode_conversation(encode_conversation(conversation())) == conversation()


@pytest.mark.parametrize(
    ("field", "breakage"),
    [
        ("prompt.turns", lambda m: m.ClearField("turns")),
        ("prompt.turns[1].question", lambda m: setattr(m.turns[1], "question", " \n")),
        ("prompt.turns[1].answer", lambda m: setattr(m.turns[1], "answer", "x")),
        (
            "prompt.turns[0].passages[1].number",
            lambda m: setattr(m.turns[0].passages[1], "number", 1),
        ),
        (
            "prompt.turns[0].passages[0].number",
            lambda m: setattr(m.turns[0].passages[0], "number", 0),
        ),
        (
            "prompt.turns[0].answer_token_ids[0].token_ids",
            lambda m: setattr(m.turns[0].answer_token_ids[0], "token_ids", b"\xff" * 4),
        ),
    ],
)
def test_decode_conversation_names_the_bad_field(
    field: str, breakage: Callable[[common_pb2.Prompt], object]
) -> None:
    message = encode_conversation(conversation())
    breakage(message)

    with pytest.raises(InvalidRequest) as caught:
        decode_conversation(message)

    assert [violation.field for violation in caught.value.violations] == [field]


def verified(*, end: AnswerEnd | None, stop_text_length: int | None) -> VerifiedTokens:
    return VerifiedTokens(
        key=RoundKey(answer_id="a", round=1, drafter_index=0, committed_length=0, prefix_hash=7),
        token_ids=(3, 4),
        logprobs=(-0.5, -1.0),
        accepted_node_idx=(0,),
        has_bonus=True,
        end=end,
        stop_text_length=stop_text_length,
        forward_time_us=5,
        is_last_of_round=True,
    )


@pytest.mark.parametrize(
    ("end", "stop_text_length"),
    [(None, None), (AnswerEnd.STOP, 0), (AnswerEnd.LENGTH, None), (AnswerEnd.CONTEXT, None)],
)
def test_verified_tokens_survive_the_round_trip(
    end: AnswerEnd | None, stop_text_length: int | None
) -> None:
    original = verified(end=end, stop_text_length=stop_text_length)

    assert decode_verified(encode_verified(original), vocab_size=10) == original


def test_decode_verified_refuses_contradicting_arrays() -> None:
    message = encode_verified(verified(end=None, stop_text_length=None))
    message.logprobs = message.logprobs[:4]

    with pytest.raises(InvalidRequest, match="1 values for 2 tokens"):
        decode_verified(message, vocab_size=10)


def test_top_tokens_survive_the_round_trip_a_row_a_token() -> None:
    tops = (
        TopTokens(token_ids=(3, 1), logprobs=(-0.5, -2.0)),
        TopTokens(token_ids=(), logprobs=()),
    )
    original = replace(verified(end=None, stop_text_length=None), top_tokens=tops)

    assert decode_verified(encode_verified(original), vocab_size=10) == original


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "num_rows", "text"),
    [
        ((3,), (-0.5,), 1, "top_tokens: 1 entries for 2 tokens"),
        ((3, 4), (-0.5,), 2, r"top_tokens\[0\].logprobs: 1 values for 2 tokens"),
        ((10,), (-0.5,), 2, r"top_tokens\[0\].token_ids: token id 10"),
        ((3,), (float("nan"),), 2, r"top_tokens\[0\].logprobs: value nan"),
    ],
)
def test_decode_verified_refuses_top_tokens_that_fit_nothing(
    token_ids: tuple[int, ...], logprobs: tuple[float, ...], num_rows: int, text: str
) -> None:
    rows = (TopTokens(token_ids=token_ids, logprobs=logprobs),) * num_rows
    message = encode_verified(replace(verified(end=None, stop_text_length=None), top_tokens=rows))

    with pytest.raises(InvalidRequest, match=text):
        decode_verified(message, vocab_size=10)
