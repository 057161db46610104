"""Sampling parameters from the wire: what is not in range is refused by name, all at once."""

from __future__ import annotations

import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from specrag.v1 import common_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.wire.sampling import (
    SamplingOptions,
    check_biased_tokens,
    decode_sampling,
    encode_sampling,
)

NAN, INF = float("nan"), float("inf")
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.1, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "top_k": (0, 2**31 - 1),
    "max_tokens": (1, 4096),
    "min_tokens": (0, 4096),
    "num_top_logprobs": (0, 20),
}
"""Of the contract: from the least to the most; top_p is over 0."""
INTEGERS = ("top_k", "max_tokens", "min_tokens", "num_top_logprobs")
VOCAB_SIZE = 100


def fields_at_fault(message: common_pb2.SamplingParams) -> list[str]:
    with pytest.raises(InvalidRequest) as caught:
        decode_sampling(message, vocab_size=VOCAB_SIZE)
    return [violation.field for violation in caught.value.violations]


def test_every_parameter_survives_the_round_trip() -> None:
    options = SamplingOptions(
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=1.5,
        logit_bias=((0, -100.0), (7, 2.5), (99, 100.0)),
        max_tokens=9,
        min_tokens=9,
        stop=("a", "b"),
        num_top_logprobs=0,
    )
    assert decode_sampling(encode_sampling(options), vocab_size=VOCAB_SIZE) == options


def test_absent_log_probs_stay_absent() -> None:
    message = encode_sampling(SamplingOptions())
    assert not message.HasField("num_top_logprobs")
    assert decode_sampling(message) == decode_sampling(common_pb2.SamplingParams())
    assert decode_sampling(message) == SamplingOptions()


@pytest.mark.parametrize("name", [name for name in RANGES if name not in INTEGERS])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -2.5, 11.0])
def test_number_out_of_range_is_named_with_value_and_limit(name: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_sampling(common_pb2.SamplingParams(**{name: value}))  # type: ignore[arg-type]
    (violation,) = caught.value.violations
    assert violation.field == f"sampling.{name}"
    assert violation.description.startswith(f"{value:g} is ")
    assert f"{RANGES[name][0]:g} to {RANGES[name][1]:g}" in violation.description


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("min_tokens", common_pb2.SamplingParams(min_tokens=-1)),
        ("min_tokens", common_pb2.SamplingParams(min_tokens=257)),
        ("min_tokens", common_pb2.SamplingParams(min_tokens=6, max_tokens=5)),
        ("num_top_logprobs", common_pb2.SamplingParams(num_top_logprobs=21)),
        ("num_top_logprobs", common_pb2.SamplingParams(num_top_logprobs=-1)),
        ("logit_bias[3]", common_pb2.SamplingParams(logit_bias={3: 100.5})),
        ("logit_bias[3]", common_pb2.SamplingParams(logit_bias={3: NAN})),
        ("logit_bias[3]", common_pb2.SamplingParams(logit_bias={3: -INF})),
        ("logit_bias[-1]", common_pb2.SamplingParams(logit_bias={-1: 1.0})),
        ("logit_bias[100]", common_pb2.SamplingParams(logit_bias={100: 1.0})),
        ("logit_bias", common_pb2.SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))),
    ],
)
def test_field_at_fault_is_named(field: str, message: common_pb2.SamplingParams) -> None:
    assert set(fields_at_fault(message)) >= {f"sampling.{field}"}
    assert all(one.startswith("sampling.logit_bias") for one in fields_at_fault(message)[1:])


def test_min_tokens_are_held_against_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match=r"6 is outside 0 to max_tokens=5"):
        decode_sampling(common_pb2.SamplingParams(min_tokens=6, max_tokens=5))


def test_biased_tokens_are_checked_once_the_vocabulary_is_known() -> None:
    options = decode_sampling(common_pb2.SamplingParams(logit_bias={5: 1.0, 900: 1.0}))
    check_biased_tokens(options, 901)
    with pytest.raises(InvalidRequest, match="outside 0 to 899") as caught:
        check_biased_tokens(options, 900)
    assert [one.field for one in caught.value.violations] == ["sampling.logit_bias[900]"]


floats = st.one_of(
    st.floats(width=32), st.sampled_from([0.0, 0.1, 1.0, 2.0, -2.0, 10.0, 1e-45, NAN, INF])
)
integers = st.one_of(
    st.integers(-(2**31), 2**31 - 1), st.integers(-1, 30), st.sampled_from([4096, 4097])
)
messages = st.builds(
    lambda fields, biases, stop: common_pb2.SamplingParams(logit_bias=biases, stop=stop, **fields),
    st.fixed_dictionaries(
        {}, optional={name: integers if name in INTEGERS else floats for name in RANGES}
    ),
    st.dictionaries(st.one_of(st.integers(-2, 102), integers), floats, max_size=4),
    st.lists(st.text(max_size=66), max_size=9),
)


def is_in_range(message: common_pb2.SamplingParams, name: str) -> bool:
    if not message.HasField(name):  # type: ignore[arg-type]
        return True
    value = getattr(message, name)
    least, most = RANGES[name]
    if name == "min_tokens":
        most = max(0, message.max_tokens if message.HasField("max_tokens") else 256)
    if name == "top_p" and value == 0:
        return False
    # Floats arrive as float32: the contract's 0.1 is the nearest of those.
    return math.isfinite(value) and (least <= value <= most)


def list_faults(message: common_pb2.SamplingParams) -> set[str]:
    """The fields at fault, from the contract's words."""
    faults = {f"sampling.{name}" for name in RANGES if not is_in_range(message, name)}
    for token_id, bias in message.logit_bias.items():
        if not (0 <= token_id < VOCAB_SIZE and math.isfinite(bias) and -100 <= bias <= 100):
            faults.add(f"sampling.logit_bias[{token_id}]")
    if len(message.stop) > 8:
        return faults | {"sampling.stop"}
    return faults | {
        f"sampling.stop[{idx}]" for idx, stop in enumerate(message.stop) if not 1 <= len(stop) <= 64
    }


@given(message=messages)
def test_any_message_is_decoded_whole_or_refused_with_every_fault(
    message: common_pb2.SamplingParams,
) -> None:
    faults = list_faults(message)
    if faults:
        assert set(fields_at_fault(message)) == faults
        return
    options = decode_sampling(message, vocab_size=VOCAB_SIZE)
    again = encode_sampling(options)
    assert decode_sampling(again, vocab_size=VOCAB_SIZE) == options
    for name in RANGES:
        if message.HasField(name):  # type: ignore[arg-type]
            assert getattr(options, name) == getattr(message, name)
    assert dict(options.logit_bias) == dict(message.logit_bias)


@given(data=st.binary(max_size=60))
def test_bytes_from_anywhere_give_options_or_a_refusal_that_names_fields(data: bytes) -> None:
    message = common_pb2.SamplingParams()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    faults = list_faults(message)
    if faults:
        assert set(fields_at_fault(message)) == faults
    else:
        decode_sampling(message, vocab_size=VOCAB_SIZE)
