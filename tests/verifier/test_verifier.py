from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specrag_common.runtime import deadlines
from specrag_common.runtime.errors import (
    AlreadyExists,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidRequest,
    SequenceTooLong,
    SpecragError,
)
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.wire.rounds import encode_round_key
from specrag_common.wire.sampling import SamplingOptions
from specrag_common.wire.verified import AnswerEnd, decode_verified
from specrag_inference.messages import OpenSequence
from specrag_inference.testing import BYTE_VOCAB_SIZE
from specrag_serving.testing import (
    AnswerSetup,
    HandVerifier,
    Started,
    build_conversation,
    wait_freed,
)
from specrag_verifier.servicer import SERVICE
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

Stub: TypeAlias = "verifier_pb2_grpc.VerifierServiceAsyncStub"

END_OF_TURN = 258

_numbers = itertools.count()


def setup(**changes: Any) -> AnswerSetup:
    return AnswerSetup(answer_id=f"answer-{next(_numbers)}", **changes)


async def generate(stub: Stub, answer: AnswerSetup) -> list[int]:
    request = verifier_pb2.GenerateRequest(open=answer.open_verification())
    token_ids: list[int] = []
    async for response in stub.Generate(request):
        if response.WhichOneof("message") == "verified":
            verified = decode_verified(response.verified, vocab_size=BYTE_VOCAB_SIZE)
            token_ids += verified.token_ids
    return token_ids


def chain_tree(token_ids: list[int]) -> TokenTree:
    branch = DraftBranch(
        token_ids=tuple(token_ids), laws=(None,) * len(token_ids), source=DraftSource.SUFFIX
    )
    proposal = DraftProposal(drafter_index=0, committed_length=0, branches=(branch,))
    return merge_proposals([proposal], max_draft_tokens=64)


@pytest.mark.parametrize("mode", list(VerificationMode))
async def test_rounds_without_drafts_give_the_tokens_of_generate(
    stub: Stub, mode: VerificationMode
) -> None:
    sampling = SamplingOptions(temperature=1.0, top_p=0.9, max_tokens=12)
    key = bytes(range(16))
    expected = await generate(stub, setup(mode=mode, random_key=key, sampling=sampling))

    async with HandVerifier(stub, setup(mode=mode, random_key=key, sampling=sampling)) as stepwise:
        await stepwise.wait_prefilled()
        while stepwise.end is None:
            await stepwise.verify()
    async with HandVerifier(stub, setup(mode=mode, random_key=key, sampling=sampling)) as free:
        await free.wait_prefilled()
        messages = await free.verify(free_run_tokens=4096)

    assert len(expected) == 12
    assert stepwise.token_ids == expected
    assert free.token_ids == expected
    assert [len(message.token_ids) for message in messages] == [1] * 12
    assert [message.is_last_of_round for message in messages] == [False] * 11 + [True]
    assert free.end == AnswerEnd.LENGTH


@pytest.mark.parametrize("num_right", [0, 1, 3, 5])
async def test_greedy_rounds_accept_the_right_prefix_of_a_draft(stub: Stub, num_right: int) -> None:
    expected = await generate(stub, setup())
    drafted = [*expected[:num_right], (expected[num_right] + 1) % 256, 7]

    async with HandVerifier(stub, setup()) as stream:
        await stream.wait_prefilled()
        (message,) = await stream.verify(chain_tree(drafted))
        while stream.end is None:
            await stream.verify()

    assert len(message.accepted_node_idx) == num_right
    assert list(message.token_ids) == expected[: num_right + 1]
    assert not message.has_bonus
    assert stream.token_ids == expected


async def test_whole_accepted_draft_is_followed_by_a_bonus_token(stub: Stub) -> None:
    expected = await generate(stub, setup())

    async with HandVerifier(stub, setup()) as stream:
        await stream.wait_prefilled()
        (message,) = await stream.verify(chain_tree(expected[:4]))

    assert list(message.token_ids) == expected[:5]
    assert message.accepted_node_idx == (0, 1, 2, 3)
    assert message.has_bonus


async def test_round_sent_before_the_prefill_is_done_waits_for_it(stub: Stub) -> None:
    expected = await generate(stub, setup())

    async with HandVerifier(stub, setup(tenant="another")) as stream:
        await stream.send(free_run_tokens=2)
        await stream.wait_prefilled()
        await stream.receive()

    assert stream.token_ids == expected[:3]


async def test_resumed_answer_goes_on_as_if_never_interrupted(stub: Stub) -> None:
    sampling = SamplingOptions(temperature=1.0, max_tokens=10)
    whole = setup(mode=VerificationMode.COUPLED, sampling=sampling)
    expected = await generate(stub, whole)
    message = whole.open_verification()
    message.committed_token_ids = np.array(expected[:4], dtype="<i4").tobytes()

    rest: list[int] = []
    async for response in stub.Generate(verifier_pb2.GenerateRequest(open=message)):
        if response.WhichOneof("message") == "verified":
            rest += np.frombuffer(response.verified.token_ids, dtype="<i4").tolist()

    assert rest == expected[4:]


async def test_stop_string_ends_the_answer_and_says_where_its_text_ends(stub: Stub) -> None:
    expected = await generate(stub, setup())
    text = bytes(one for one in expected if one < 256).decode("utf-8", errors="replace")
    stop = next(char for char in text if char != "\ufffd" and char.isprintable())

    async with HandVerifier(
        stub, setup(sampling=SamplingOptions(max_tokens=16, stop=(stop,)))
    ) as stream:
        await stream.wait_prefilled()
        messages = await stream.verify(free_run_tokens=64)

    assert stream.end == AnswerEnd.STOP
    assert messages[-1].stop_text_length is not None
    assert stream.token_ids == expected[: len(stream.token_ids)]


async def test_prompt_that_does_not_fit_loses_passages_from_the_end(stub: Stub) -> None:
    conversation = build_conversation(*["x" * 250] * 5)

    async with HandVerifier(stub, setup(conversation=conversation)) as stream:
        accepted = await stream.wait_prefilled()

    num_kept = len(accepted.kept_passages)
    assert list(accepted.kept_passages) == list(range(1, num_kept + 1))
    assert 1 <= num_kept < 5
    assert accepted.num_dropped_passages == 5 - num_kept
    assert accepted.num_prompt_tokens <= 1024 - 16


@pytest.mark.parametrize("num_drafted", [0, 1, 7, 40])
async def test_answer_that_fills_the_context_ends_there_with_and_without_drafts(
    stub: Stub, num_drafted: int
) -> None:
    # Which greedy answers never end by themselves depends on the machine's last bits.
    for char in "acglruwxz":
        answer = setup(
            conversation=build_conversation(char * 300),
            sampling=SamplingOptions(max_tokens=4096),
        )
        expected = await generate(stub, answer)
        if END_OF_TURN not in expected:
            break

    async with HandVerifier(stub, answer) as stream:
        accepted = await stream.wait_prefilled()
        while stream.end is None:
            drafted = expected[len(stream.token_ids) :][:num_drafted]
            # A draft that runs on behind the last possible token must be cut, not crash.
            padded = drafted + [7] * (num_drafted - len(drafted))
            await stream.verify(chain_tree(padded) if padded else None)

    assert stream.end == AnswerEnd.CONTEXT
    assert accepted.num_prompt_tokens + len(expected) == 1024
    assert stream.token_ids == expected


async def test_question_longer_than_the_context_names_the_limit(stub: Stub) -> None:
    answer = setup(conversation=build_conversation(question="w" * 2000))

    with pytest.raises(SequenceTooLong, match="max_model_len=1024"):
        await generate(stub, answer)


Change = Callable[[verifier_pb2.OpenVerification], object]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("open.answer_id", lambda m: setattr(m, "answer_id", "")),
        ("open.sampling.temperature", lambda m: setattr(m.sampling, "temperature", -1)),
        ("open.sampling.max_tokens", lambda m: setattr(m.sampling, "max_tokens", 0)),
        ("open.mode", lambda m: setattr(m, "mode", 0)),
        ("open.random_key", lambda m: setattr(m, "random_key", b"short")),
        ("open.prompt.turns", lambda m: m.prompt.ClearField("turns")),
        ("open.prompt.turns[0].question", lambda m: setattr(m.prompt.turns[0], "question", " ")),
        ("open.committed_token_ids", lambda m: setattr(m, "committed_token_ids", b"\xff" * 4)),
        ("open.committed_token_ids", lambda m: setattr(m, "committed_token_ids", bytes(64))),
        ("open.tenant", lambda m: setattr(m, "tenant", "x" * 129)),
    ],
)
async def test_bad_open_names_the_field(stub: Stub, field: str, change: Change) -> None:
    message = setup().open_verification()
    change(message)

    with pytest.raises(InvalidRequest) as caught:
        async for _ in stub.Generate(verifier_pb2.GenerateRequest(open=message)):
            pass

    assert [violation.field for violation in caught.value.violations] == [field]


RoundChange = Callable[[verifier_pb2.VerificationRound], object]


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (InvalidRequest, "round.key.answer_id", lambda m: setattr(m.key, "answer_id", "x")),
        (InvalidRequest, "round.key.round", lambda m: setattr(m.key, "round", 0)),
        (
            FailedPrecondition,
            "committed_length=7",
            lambda m: setattr(m.key, "committed_length", 7),
        ),
        (FailedPrecondition, "prefix hashes", lambda m: setattr(m.key, "prefix_hash", 1)),
        (InvalidRequest, "round.free_run_tokens", lambda m: setattr(m, "free_run_tokens", -1)),
        (
            InvalidRequest,
            "round.tree.token_ids",
            lambda m: setattr(m.tree, "token_ids", b"\xff\xff\xff\x7f"),
        ),
    ],
)
async def test_bad_round_ends_the_stream_and_says_why(
    stub: Stub, error: type[SpecragError], words: str, change: RoundChange
) -> None:
    async with HandVerifier(stub, setup()) as stream:
        await stream.wait_prefilled()
        await stream.verify()
        message = verifier_pb2.VerificationRound(key=encode_round_key(stream.next_key()))
        change(message)
        await stream.call.write(verifier_pb2.VerifyTokensRequest(round=message))

        with pytest.raises(error, match=words):
            await stream.call.read()


async def test_first_message_must_open_and_later_ones_must_not(stub: Stub) -> None:
    call = stub.VerifyTokens()
    await call.write(verifier_pb2.VerifyTokensRequest(round=verifier_pb2.VerificationRound()))
    with pytest.raises(InvalidRequest, match="first message"):
        await call.read()

    async with HandVerifier(stub, setup()) as stream:
        await stream.wait_prefilled()
        await stream.call.write(verifier_pb2.VerifyTokensRequest(open=setup().open_verification()))
        with pytest.raises(InvalidRequest, match="must be a round"):
            await stream.call.read()


async def test_second_stream_of_a_live_answer_is_refused(stub: Stub) -> None:
    answer = setup()
    async with HandVerifier(stub, answer) as stream:
        await stream.wait_prefilled()
        with pytest.raises(AlreadyExists, match=answer.answer_id):
            await generate(stub, answer)
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF

    assert await generate(stub, answer)


async def test_every_way_out_frees_the_blocks(stub: Stub, verifier: Started) -> None:
    rng = random.Random(5)
    sampling = SamplingOptions(temperature=1.0, max_tokens=400)

    async def leave_somewhere(delay_s: float, way: str) -> None:
        async with HandVerifier(
            stub, setup(sampling=sampling, tenant=f"tenant-{delay_s}")
        ) as stream:
            if way == "half-close":
                await stream.call.done_writing()
            elif way == "round":
                await stream.send(free_run_tokens=300)
            await asyncio.sleep(delay_s)

    await asyncio.gather(
        *(
            leave_somewhere(rng.random() * 0.3, rng.choice(["cancel", "half-close", "round"]))
            for _ in range(40)
        )
    )

    await wait_freed(verifier)


async def test_deadline_frees_the_blocks(stub: Stub, verifier: Started) -> None:
    request = verifier_pb2.GenerateRequest(
        open=setup(sampling=SamplingOptions(max_tokens=600)).open_verification()
    )

    with pytest.raises(SpecragError) as caught:
        async for _ in stub.Generate(request, timeout=0.15):
            pass

    assert caught.value.status is grpc.StatusCode.DEADLINE_EXCEEDED
    await wait_freed(verifier)


async def test_engine_ends_a_sequence_whose_calls_time_is_up(verifier: Started) -> None:
    deadlines.set_remaining(0.0)
    sequence = verifier.service.engine.open(OpenSequence(sequence_id="a", prompt_token_ids=(1,)))
    try:
        with pytest.raises(DeadlineExceeded, match="ran out of time"):
            await sequence.wait_opened()
    finally:
        sequence.close()
        deadlines.set_remaining(None)

    await wait_freed(verifier)


async def test_tokenizer_travels_whole_and_not_at_all_when_it_is_known(stub: Stub) -> None:
    info = await stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())
    fingerprint = info.model.tokenizer_fingerprint
    chunks = [one async for one in stub.GetTokenizer(verifier_pb2.GetTokenizerRequest())]
    known = [
        one
        async for one in stub.GetTokenizer(
            verifier_pb2.GetTokenizerRequest(known_fingerprint=fingerprint)
        )
    ]

    tokenizer = Tokenizer.from_str(b"".join(chunk.data for chunk in chunks).decode())
    assert tokenizer.encode("hi", add_special_tokens=False).ids == [ord("h"), ord("i")]
    assert {chunk.fingerprint for chunk in chunks} == {fingerprint}
    assert [(one.fingerprint, one.data) for one in known] == [(fingerprint, b"")]


async def test_model_info_describes_the_replica(stub: Stub, verifier: Started) -> None:
    model = (await stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())).model

    assert (model.max_model_len, model.vocab_size, model.dtype) == (1024, 259, "float32")
    assert list(model.eos_token_ids) == [258]
    assert list(model.capabilities) == [
        common_pb2.CAPABILITY_VERIFY_TOKENS,
        common_pb2.CAPABILITY_GENERATE,
    ]
    health = health_pb2_grpc.HealthStub(verifier.channel)
    status = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert status.status == health_pb2.HealthCheckResponse.SERVING
