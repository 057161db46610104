from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from specrag.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from specrag_common.runtime.errors import AlreadyExists, FailedPrecondition, InvalidRequest
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_common.wire.rounds import RoundKey, encode_round_key, prefix_hash
from specrag_common.wire.sampling import SamplingOptions
from specrag_drafter.hosting import get_health_name
from specrag_drafter.servicer import SERVICE
from specrag_serving.testing import (
    AnswerSetup,
    HandDrafter,
    Started,
    build_conversation,
    wait_freed,
)

if TYPE_CHECKING:
    from specrag_inference.prompts import ChatTokenizer

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

Stub: TypeAlias = "drafter_pb2_grpc.DrafterServiceAsyncStub"

BOTH = (DraftSource.SUFFIX, DraftSource.MODEL)
_numbers = itertools.count()


def setup(**changes: Any) -> AnswerSetup:
    return AnswerSetup(answer_id=f"answer-{next(_numbers)}", **changes)


def drafting(
    stub: Stub, tokenizer: ChatTokenizer, *sources: DraftSource, **changes: Any
) -> HandDrafter:
    message = setup(**changes).open_drafting(tokenizer.fingerprint, sources=sources)
    return HandDrafter(stub, message)


def ids(text: str) -> list[int]:
    return list(text.encode())


async def test_suffix_branch_continues_the_passage_the_answer_copies(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    conversation = build_conversation("the quick brown fox", "something else")

    async with drafting(stub, tokenizer, DraftSource.SUFFIX, conversation=conversation) as stream:
        ready = await stream.wait_ready()
        first = await stream.draft(ids("the qui"), gamma=5)
        second = await stream.draft(ids("ck b"), gamma=7)

    assert list(ready.kept_passages) == [1, 2]
    assert [branch.token_ids for branch in first.branches] == [tuple(b"ck br")]
    assert [branch.token_ids for branch in second.branches] == [tuple(b"rown fo")]
    assert {branch.source for branch in second.branches} == {DraftSource.SUFFIX}
    assert second.committed_length == len("the quick b")


async def test_suffix_drafts_do_not_depend_on_what_was_drafted_before_or_beside(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    passages = {"red": "the code is 4711", "blue": "the code is 9042", "green": "no code is known"}

    async def draft(name: str) -> list[tuple[int, ...]]:
        changes = {"conversation": build_conversation(passages[name]), "tenant": name}
        async with drafting(stub, tokenizer, DraftSource.SUFFIX, **changes) as stream:
            await stream.wait_ready()
            proposals = [
                await stream.draft(ids(text), gamma=6, num_branches=2)
                for text in ("the code", " is")
            ]
        return [branch.token_ids for one in proposals for branch in one.branches]

    alone = {name: await draft(name) for name in passages}
    for order in itertools.permutations(passages):
        assert {name: await draft(name) for name in order} == alone
    beside = await asyncio.gather(*(draft(name) for name in passages))
    assert dict(zip(passages, beside, strict=True)) == alone
    assert any(tuple(b" 4711")[:4] == one[:4] for one in alone["red"])
    assert not any(ids("9042")[0] in one for one in alone["red"]), "no other tenant's text"


async def test_dear_tokens_are_not_proposed_by_a_weak_match(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    async with drafting(stub, tokenizer, DraftSource.SUFFIX) as stream:
        await stream.wait_ready()
        cheap = await stream.draft(ids("zq e"), gamma=4, min_probability=0.001)
        dear = await stream.draft(gamma=4, min_probability=0.99)

    assert cheap.branches
    assert not dear.branches


@pytest.mark.parametrize("bound", [-0.5, 0.0, 1.5, float("nan")])
async def test_bound_that_is_no_probability_is_refused(
    stub: Stub, tokenizer: ChatTokenizer, bound: float
) -> None:
    async with drafting(stub, tokenizer, DraftSource.SUFFIX) as stream:
        await stream.wait_ready()
        with pytest.raises(InvalidRequest, match="min_probability"):
            await stream.draft(gamma=4, min_probability=bound)


async def test_sources_default_to_the_services_own(stub: Stub, tokenizer: ChatTokenizer) -> None:
    async with drafting(stub, tokenizer, conversation=build_conversation("abcdef")) as stream:
        await stream.wait_ready()
        proposal = await stream.draft(ids("abc"), gamma=2)

    assert {branch.source for branch in proposal.branches} == {DraftSource.SUFFIX}


async def test_gamma_0_only_ingests(stub: Stub, tokenizer: ChatTokenizer) -> None:
    async with drafting(stub, tokenizer, *BOTH) as stream:
        await stream.wait_ready()
        proposal = await stream.draft(ids("some"), gamma=0)

    assert proposal.branches == ()
    assert proposal.committed_length == 4


async def test_greedy_model_drafts_are_deterministic_and_go_on_after_a_commit(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    async with drafting(stub, tokenizer, DraftSource.MODEL) as whole:
        await whole.wait_ready()
        (branch,) = (await whole.draft(gamma=8)).branches
    async with drafting(stub, tokenizer, DraftSource.MODEL) as stepwise:
        await stepwise.wait_ready()
        await stepwise.draft(gamma=8)
        (accepted,) = (await stepwise.draft(branch.token_ids[:3], gamma=5)).branches
        (ingested,) = (await stepwise.draft(branch.token_ids[3:8], gamma=1)).branches

    assert branch.source is DraftSource.MODEL
    assert branch.laws == (None,) * 8
    assert accepted.token_ids == branch.token_ids[3:]
    assert len(ingested.token_ids) == 1


async def test_sampled_model_drafts_carry_the_law_they_were_drawn_from(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    sampling = SamplingOptions(temperature=1.0, top_p=0.9, max_tokens=16)

    async with drafting(stub, tokenizer, DraftSource.MODEL, sampling=sampling) as stream:
        await stream.wait_ready()
        proposal = await stream.draft(gamma=4, num_branches=3)

    assert len(proposal.branches) == 3
    for branch in proposal.branches:
        for token_id, law in zip(branch.token_ids, branch.laws, strict=True):
            assert law is not None
            assert token_id in law.token_ids
            assert float(law.probs.sum()) == pytest.approx(1, abs=1e-5)


async def test_coupled_drafts_carry_no_law_and_depend_on_the_key_only(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    sampling = SamplingOptions(temperature=1.0, max_tokens=16)

    async def draft(random_key: bytes) -> tuple[int, ...]:
        async with drafting(
            stub,
            tokenizer,
            DraftSource.MODEL,
            sampling=sampling,
            mode=VerificationMode.COUPLED,
            random_key=random_key,
        ) as stream:
            await stream.wait_ready()
            (branch,) = (await stream.draft(gamma=8)).branches
        assert branch.laws == (None,) * 8
        return branch.token_ids

    assert await draft(b"a" * 16) == await draft(b"a" * 16)
    assert await draft(b"a" * 16) != await draft(b"b" * 16)


async def test_suffix_branches_come_before_model_branches(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    conversation = build_conversation("the quick brown fox")

    async with drafting(stub, tokenizer, *BOTH, conversation=conversation) as stream:
        await stream.wait_ready()
        async with asyncio.timeout(3):
            proposal = await stream.draft(ids("the qui"), gamma=3, num_branches=2)
            while proposal.branches[-1].source is DraftSource.SUFFIX:
                proposal = await stream.draft(gamma=3, num_branches=2)

    *first, third, fourth = [branch.source for branch in proposal.branches]
    assert set(first) == {DraftSource.SUFFIX}
    assert (third, fourth) == (DraftSource.MODEL, DraftSource.MODEL)
    assert proposal.branches[0].token_ids == tuple(b"ck ")


async def test_suffix_rounds_are_answered_while_the_engine_is_stuck(
    stub: Stub, tokenizer: ChatTokenizer, drafter: Started
) -> None:
    conversation = build_conversation("the quick brown fox")
    os.kill(drafter.service.engine.pid, signal.SIGSTOP)
    try:
        async with drafting(
            stub, tokenizer, *BOTH, conversation=conversation, tenant="stuck"
        ) as stream:
            async with asyncio.timeout(1):
                await stream.wait_ready()
                first = await stream.draft(ids("the qui"), gamma=3)
                second = await stream.draft(ids("ck "), gamma=3)
    finally:
        os.kill(drafter.service.engine.pid, signal.SIGCONT)

    assert [branch.token_ids for branch in first.branches] == [tuple(b"ck ")]
    assert [branch.token_ids for branch in second.branches] == [tuple(b"bro")]
    await wait_freed(drafter)


async def test_every_round_is_answered_once_in_order_when_sent_at_once(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    async with drafting(stub, tokenizer, DraftSource.MODEL) as stream:
        await stream.wait_ready()
        for _ in range(20):
            await stream.send(ids("x"), gamma=8)
        answered = [await stream.receive(gamma=8) for _ in range(20)]
        await stream.call.done_writing()
        assert await stream.call.read() is grpc.aio.EOF

    assert [proposal.committed_length for proposal in answered] == list(range(1, 21))
    assert len(answered[-1].branches[0].token_ids) == 8


async def test_stale_round_is_answered_empty_and_changes_nothing(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    answer = setup(conversation=build_conversation("the quick brown fox"))
    message = answer.open_drafting(tokenizer.fingerprint, sources=[DraftSource.SUFFIX])
    async with HandDrafter(stub, message) as stream:
        await stream.wait_ready()
        await stream.draft(ids("the qui"), gamma=3)
        for length, tokens in ((3, "abc"), (9, "zz")):
            key = RoundKey(
                answer_id=answer.answer_id,
                round=5,
                drafter_index=0,
                committed_length=length,
                prefix_hash=prefix_hash(ids(tokens)),
            )
            stale = drafter_pb2.DraftRound(
                key=encode_round_key(key),
                committed_token_ids=b"",
                gamma=3,
                num_branches=1,
            )
            await stream.call.write(drafter_pb2.DraftTokensRequest(round=stale))
            dropped = await stream.receive(gamma=3)
            assert (dropped.committed_length, dropped.branches) == (length, ())
        proposal = await stream.draft(ids("ck b"), gamma=3)

    assert [branch.token_ids for branch in proposal.branches] == [tuple(b"row")]


async def test_drafts_stop_at_the_context_and_more_tokens_are_refused(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    async with drafting(stub, tokenizer, DraftSource.MODEL) as stream:
        ready = await stream.wait_ready()
        num_left = 1024 - ready.num_prompt_tokens - 3
        nearly = await stream.draft([7] * num_left, gamma=8)
        full = await stream.draft([7] * 3, gamma=8)
        await stream.send([7], gamma=8)
        with pytest.raises(InvalidRequest, match="max_model_len=1024"):
            await stream.call.read()

    assert [len(branch.token_ids) for branch in nearly.branches] == [3]
    assert full.branches == ()


async def test_other_tokenizer_is_refused_naming_both(stub: Stub, tokenizer: ChatTokenizer) -> None:
    async with HandDrafter(stub, setup().open_drafting("f00d")) as stream:
        with pytest.raises(FailedPrecondition, match="f00d") as caught:
            await stream.wait_ready()

    assert caught.value.reason == "TOKENIZER_MISMATCH"
    assert caught.value.metadata == {"target": "f00d", "drafter": tokenizer.fingerprint}


Change = Callable[[drafter_pb2.OpenDrafting], object]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("open.answer_id", lambda m: setattr(m, "answer_id", "")),
        ("open.drafter_index", lambda m: setattr(m, "drafter_index", -1)),
        ("open.tokenizer_fingerprint", lambda m: setattr(m, "tokenizer_fingerprint", "")),
        ("open.sources[0]", lambda m: m.sources.append(0)),
        ("open.mode", lambda m: setattr(m, "mode", 7)),
        ("open.random_key", lambda m: setattr(m, "random_key", b"")),
        ("open.sampling.top_p", lambda m: setattr(m.sampling, "top_p", 2)),
        ("open.committed_token_ids", lambda m: setattr(m, "committed_token_ids", b"\1")),
        ("open.prompt.turns", lambda m: m.prompt.ClearField("turns")),
    ],
)
async def test_bad_open_names_the_field(
    stub: Stub, tokenizer: ChatTokenizer, field: str, change: Change
) -> None:
    message = setup().open_drafting(tokenizer.fingerprint)
    change(message)

    async with HandDrafter(stub, message) as stream:
        with pytest.raises(InvalidRequest) as caught:
            await stream.call.read()

    assert [violation.field for violation in caught.value.violations] == [field]


RoundChange = Callable[[drafter_pb2.DraftRound], object]


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("round.gamma", lambda m: setattr(m, "gamma", 65)),
        ("round.gamma", lambda m: setattr(m, "gamma", -1)),
        ("round.num_branches", lambda m: setattr(m, "num_branches", 0)),
        ("round.num_branches", lambda m: setattr(m, "num_branches", 9)),
        ("round.committed_token_ids", lambda m: setattr(m, "committed_token_ids", b"\xff" * 4)),
        ("round.key.answer_id", lambda m: setattr(m.key, "answer_id", "another")),
        ("round.key.drafter_index", lambda m: setattr(m.key, "drafter_index", 3)),
    ],
)
async def test_bad_round_names_the_field(
    stub: Stub, tokenizer: ChatTokenizer, field: str, change: RoundChange
) -> None:
    answer = setup()
    key = RoundKey(
        answer_id=answer.answer_id,
        round=0,
        drafter_index=0,
        committed_length=0,
        prefix_hash=prefix_hash([]),
    )
    message = drafter_pb2.DraftRound(key=encode_round_key(key), gamma=1, num_branches=1)
    change(message)

    async with HandDrafter(stub, answer.open_drafting(tokenizer.fingerprint)) as stream:
        await stream.wait_ready()
        await stream.call.write(drafter_pb2.DraftTokensRequest(round=message))
        with pytest.raises(InvalidRequest) as caught:
            await stream.call.read()

    assert [violation.field for violation in caught.value.violations] == [field]


async def test_second_stream_of_one_drafter_and_answer_is_refused(
    stub: Stub, tokenizer: ChatTokenizer
) -> None:
    answer = setup()
    async with HandDrafter(stub, answer.open_drafting(tokenizer.fingerprint)) as stream:
        await stream.wait_ready()
        same = answer.open_drafting(tokenizer.fingerprint)
        async with HandDrafter(stub, same) as second:
            with pytest.raises(AlreadyExists, match="drafter_index=0"):
                await second.wait_ready()
        other = answer.open_drafting(tokenizer.fingerprint, drafter_index=1)
        async with HandDrafter(stub, other) as third:
            await third.wait_ready()


async def test_every_way_out_frees_the_blocks(
    stub: Stub, tokenizer: ChatTokenizer, drafter: Started
) -> None:
    rng = random.Random(3)

    async def leave_somewhere(delay_s: float, way: str) -> None:
        async with drafting(stub, tokenizer, *BOTH, tenant=f"tenant-{delay_s}") as stream:
            if way == "half-close":
                await stream.call.done_writing()
            elif way == "round":
                await stream.wait_ready()
                for _ in range(5):
                    await stream.send(ids("y"), gamma=64, num_branches=2)
            await asyncio.sleep(delay_s)

    await asyncio.gather(
        *(
            leave_somewhere(rng.random() * 0.3, rng.choice(["cancel", "half-close", "round"]))
            for _ in range(40)
        )
    )

    await wait_freed(drafter)


async def test_model_info_and_health_name_each_source(stub: Stub, drafter: Started) -> None:
    model = (await stub.GetModelInfo(drafter_pb2.DrafterServiceGetModelInfoRequest())).model
    health = health_pb2_grpc.HealthStub(drafter.channel)
    names = [SERVICE, *(get_health_name(source) for source in DraftSource)]
    statuses = [
        (await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in names
    ]

    assert list(model.capabilities) == [
        common_pb2.CAPABILITY_DRAFT_SUFFIX,
        common_pb2.CAPABILITY_DRAFT_TOKENS,
    ]
    assert statuses == [health_pb2.HealthCheckResponse.SERVING] * 3
