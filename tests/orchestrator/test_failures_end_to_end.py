"""What the caller sees when a part of the mesh fails, is slow, or is not there."""

from __future__ import annotations

import asyncio
import socket
import time

import grpc
import pytest
from specrag.v1 import common_pb2, rag_pb2, rag_pb2_grpc
from specrag_common.runtime.errors import (
    Cancelled,
    Capacity,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    NotFound,
    UpstreamUnavailable,
)

from tests.orchestrator.mesh import (
    make_passages,
    make_request,
    running_mesh,
)
from tests.orchestrator.scripted_target import (
    DraftScript,
    TargetScript,
    decode_ids,
    script_of,
)

pytestmark = pytest.mark.integration

TARGET_ONLY = rag_pb2.ANSWER_POLICY_TARGET_ONLY
JOINT = rag_pb2.ANSWER_POLICY_JOINT
TEXT = "The answer is forty-two, as everybody knows by now, and always will."
LOST = UpstreamUnavailable("the device is gone")


def degradations(finished: rag_pb2.Finished) -> list[tuple[str, str]]:
    return [(one.component, one.reason) for one in finished.degraded]


async def test_drafter_that_fails_is_named_and_the_answer_goes_on() -> None:
    drafts = [
        DraftScript(script_of(TEXT), error_at_round=2, error=LOST),
        DraftScript(script_of(TEXT), wrong_every=9),
    ]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        finished = (await mesh.ask(passages=make_passages(4))).finished
        assert finished.answer == TEXT
        assert decode_ids(finished.token_ids) == script_of(TEXT)
        assert finished.policy == JOINT
        assert degradations(finished) == [("drafter-0", "UNAVAILABLE")]
        assert finished.degraded[0].detail == "the device is gone"


async def test_drafter_killed_in_mid_answer_is_named_and_the_answer_goes_on() -> None:
    drafts = [DraftScript(script_of(TEXT)), DraftScript(script_of(TEXT), wrong_every=9)]
    async with running_mesh(TargetScript(script_of(TEXT), step_s=0.01), drafts) as mesh:

        def kill(number: int) -> None:
            if number == 1:
                tasks.append(asyncio.create_task(mesh.drafter_servers[0].grpc.stop(0)))

        tasks: list[asyncio.Task[None]] = []
        mesh.drafters[0].script.on_round = kill
        finished = (await mesh.ask(passages=make_passages(4))).finished
        await asyncio.gather(*tasks)
        assert finished.answer == TEXT
        assert degradations(finished) == [("drafter-0", "UNAVAILABLE")]
        again = (await mesh.ask(passages=make_passages(4))).finished
        assert again.answer == TEXT
        assert degradations(again) == [("drafter-0", "UNAVAILABLE")]
        assert [one.drafter_index for one in again.stats.per_drafter] == [1]


async def test_hanging_drafter_delays_one_round_only_and_is_named_late() -> None:
    drafts = [
        DraftScript(script_of(TEXT), hang_at_round=1),
        DraftScript(script_of(TEXT), wrong_every=5),
    ]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts, max_draft_wait_ms=200.0) as mesh:
        began = time.monotonic()
        finished = (await mesh.ask(passages=make_passages(4))).finished
        assert time.monotonic() - began < 2.0
        assert finished.answer == TEXT
        assert degradations(finished) == [("drafter-0", "LATE")]
        await mesh.wait_idle()


async def test_all_drafters_lost_means_the_target_goes_on_alone_within_one_round() -> None:
    drafts = [DraftScript(script_of(TEXT), wrong_every=4, error_at_round=1, error=LOST)]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        finished = (await mesh.ask()).finished
        assert finished.answer == TEXT
        assert finished.policy == TARGET_ONLY
        assert degradations(finished) == [
            ("drafter-0", "UNAVAILABLE"),
            ("drafters", "NO_DRAFTERS"),
        ]
        assert len(mesh.verifier.trees) == 2, "one round with drafts, one free run"


async def test_all_drafters_lost_without_fallback_is_unavailable() -> None:
    drafts = [DraftScript(script_of(TEXT), error_at_round=1, error=LOST)]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        answered = await mesh.ask(allow_fallback=False)
        assert isinstance(answered.error, UpstreamUnavailable)
        assert answered.error.reason == "NO_DRAFTERS"
        assert answered.error.retry_delay_s
        await mesh.wait_idle()


async def test_no_drafter_configured_falls_back_or_is_refused() -> None:
    async with running_mesh(TargetScript(script_of(TEXT))) as mesh:
        finished = (await mesh.ask()).finished
        assert (finished.answer, finished.policy) == (TEXT, TARGET_ONLY)
        assert degradations(finished) == [("drafters", "NO_DRAFTERS")]
        answered = await mesh.ask(allow_fallback=False)
        assert isinstance(answered.error, UpstreamUnavailable)


def find_closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_unreachable_drafter_does_not_delay_the_answer() -> None:
    addresses = f"127.0.0.1:{find_closed_port()}"
    async with running_mesh(TargetScript(script_of(TEXT)), drafter_addresses=addresses) as mesh:
        for limit_s in (1.5, 1.0):
            began = time.monotonic()
            finished = (await mesh.ask()).finished
            assert time.monotonic() - began < limit_s
            assert degradations(finished)[0] == ("drafter-0", "UNAVAILABLE")


async def test_black_hole_drafter_delays_the_first_answer_by_its_connect_time_only() -> None:
    listening = socket.create_server(("127.0.0.1", 0))  # accepts, never answers
    addresses = f"127.0.0.1:{listening.getsockname()[1]}"
    async with running_mesh(
        TargetScript(script_of(TEXT)), drafter_addresses=addresses, drafter_connect_ms=150.0
    ) as mesh:
        began = time.monotonic()
        finished = (await mesh.ask()).finished
        assert time.monotonic() - began < 1.5
        assert degradations(finished)[0] == ("drafter-0", "UNAVAILABLE")
    listening.close()


async def test_drafter_that_comes_back_is_used_again() -> None:
    async with running_mesh(TargetScript(script_of(TEXT)), [DraftScript(script_of(TEXT))]) as mesh:
        port = mesh.drafter_servers[0].port
        await mesh.drafter_servers[0].grpc.stop(0)
        assert (await mesh.ask()).finished.policy == TARGET_ONLY
        async with mesh.restart_drafter(port):
            deadline = time.monotonic() + 5
            while (await mesh.ask()).finished.policy != JOINT:
                assert time.monotonic() < deadline, "the drafter is not used again"
                await asyncio.sleep(0.05)


async def test_drafter_with_another_tokenizer_is_left_out_and_named() -> None:
    drafts = [DraftScript([], fingerprint="another"), DraftScript(script_of(TEXT))]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        finished = (await mesh.ask(passages=make_passages(2))).finished
        assert finished.policy == JOINT
        assert degradations(finished) == [("drafter-0", "TOKENIZER_MISMATCH")]
        assert mesh.drafters[0].opened == []


async def test_only_mismatched_drafters_without_fallback_is_a_failed_precondition() -> None:
    drafts = [DraftScript([], fingerprint="another")]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        answered = await mesh.ask(allow_fallback=False)
        assert isinstance(answered.error, FailedPrecondition)


async def test_asking_for_a_source_no_drafter_has_is_named() -> None:
    async with running_mesh(TargetScript(script_of(TEXT)), [DraftScript(script_of(TEXT))]) as mesh:
        finished = (
            await mesh.ask(draft=rag_pb2.DraftOptions(sources=[common_pb2.DRAFT_SOURCE_MODEL]))
        ).finished
        assert degradations(finished)[0] == ("drafter-0", "MISSING_CAPABILITY")


async def test_asking_for_more_drafters_than_there_are_is_named() -> None:
    async with running_mesh(TargetScript(script_of(TEXT)), [DraftScript(script_of(TEXT))]) as mesh:
        finished = (
            await mesh.ask(passages=make_passages(4), draft=rag_pb2.DraftOptions(num_drafters=3))
        ).finished
        assert finished.policy == JOINT
        assert degradations(finished) == [("drafters", "TOO_FEW")]


@pytest.mark.parametrize("policy", [TARGET_ONLY, JOINT])
async def test_verifier_that_is_away_is_unavailable_at_once(policy: int) -> None:
    async with running_mesh(TargetScript(script_of(TEXT))) as mesh:
        await mesh.stop_verifier()
        answered = await mesh.ask(policy=policy)
        assert isinstance(answered.error, UpstreamUnavailable)
        assert answered.events == []


async def test_verifier_that_fails_in_mid_answer_ends_the_stream_behind_what_stands() -> None:
    target = TargetScript(script_of(TEXT), error_at_round=2, error=UpstreamUnavailable("gone"))
    drafts = [DraftScript(script_of(TEXT), wrong_every=4)]
    async with running_mesh(target, drafts) as mesh:
        answered = await mesh.ask(include_speculative=True)
        assert isinstance(answered.error, UpstreamUnavailable)
        assert TEXT.startswith(answered.replay.committed)
        assert answered.replay.committed
        await mesh.wait_idle()


async def test_internal_fault_of_the_verifier_stays_internal() -> None:
    target = TargetScript(script_of(TEXT), error_at_round=0, error=InternalError("NaN in logits"))
    async with running_mesh(target, [DraftScript(script_of(TEXT))]) as mesh:
        answered = await mesh.ask()
        assert isinstance(answered.error, InternalError)


async def test_unknown_collection_is_not_found() -> None:
    async with running_mesh(TargetScript(script_of(TEXT))) as mesh:
        answered = await mesh.ask(collection="nowhere")
        assert isinstance(answered.error, NotFound)
        assert "nowhere" in answered.error.message


async def test_slow_retriever_is_deadline_exceeded_in_time() -> None:
    async with running_mesh(TargetScript(script_of(TEXT)), retrieval_timeout_s=0.2) as mesh:
        mesh.retriever.delay_s = 5.0
        began = time.monotonic()
        answered = await mesh.ask(collection="handbook")
        assert isinstance(answered.error, DeadlineExceeded)
        assert time.monotonic() - began < 1.0


async def test_answer_without_a_deadline_of_its_caller_gets_the_default_one() -> None:
    target = TargetScript(script_of(TEXT), prefill_s=30.0)
    async with running_mesh(target, answer_timeout_s=0.3) as mesh:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{mesh.port}") as channel:
            stub: rag_pb2_grpc.RagServiceAsyncStub = rag_pb2_grpc.RagServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Answer(make_request()):
                    pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await mesh.wait_idle()


async def test_overload_is_refused_at_admission_with_a_retry_hint() -> None:
    target = TargetScript(script_of(TEXT), prefill_s=0.5)
    async with running_mesh(target, max_concurrent_answers=2) as mesh:
        answers = await asyncio.gather(*(mesh.ask(policy=TARGET_ONLY) for _ in range(4)))
        errors = [one.error for one in answers if one.error is not None]
        assert len(errors) == 2
        for error in errors:
            assert isinstance(error, Capacity)
            assert error.retry_delay_s
        assert [one.text for one in answers if one.error is None] == [TEXT, TEXT]


@pytest.mark.parametrize("policy", [TARGET_ONLY, JOINT])
@pytest.mark.parametrize("prefill_s", [0.0, 30.0])
async def test_client_that_leaves_frees_everything_within_a_second(
    policy: int, prefill_s: float
) -> None:
    target = TargetScript(script_of(TEXT), prefill_s=prefill_s, step_s=0.05)
    drafts = [DraftScript(script_of(TEXT), wrong_every=2)]
    async with running_mesh(target, drafts) as mesh:
        call = mesh.open(policy=policy)
        await call.read()
        if not prefill_s:
            await call.read()
        call.cancel()
        await mesh.wait_idle()


async def test_a_hundred_cancelled_streams_leave_no_task_behind() -> None:
    target = TargetScript(script_of(TEXT), step_s=0.002)
    drafts = [DraftScript(script_of(TEXT), wrong_every=2), DraftScript(script_of(TEXT))]
    async with running_mesh(target, drafts) as mesh:
        await mesh.ask(passages=make_passages(2))
        before = count_own_tasks()
        for number in range(100):
            call = mesh.open(passages=make_passages(2), include_speculative=True)
            for _ in range(number % 7):
                await call.read()
            call.cancel()
        await mesh.wait_idle()
        async with asyncio.timeout(1):
            while count_own_tasks() > before:  # noqa: ASYNC110 - tasks tell nobody
                await asyncio.sleep(0.01)
        assert (await mesh.ask(passages=make_passages(2))).text == TEXT


def count_own_tasks() -> int:
    """Return how many tasks run code of the orchestrator."""
    codes = (getattr(task.get_coro(), "cr_code", None) for task in asyncio.all_tasks())
    return sum("specrag_orchestrator" in code.co_filename for code in codes if code is not None)


async def test_cancel_answer_ends_the_stream_cancelled() -> None:
    target = TargetScript(script_of(TEXT), step_s=0.05)
    async with running_mesh(target, [DraftScript(script_of(TEXT), wrong_every=2)]) as mesh:
        call = mesh.open()
        retrieval = (await call.read()).event.retrieval_done
        await call.read()
        request = rag_pb2.CancelAnswerRequest(answer_id=retrieval.answer_id)
        response = await mesh.stub.CancelAnswer(request)
        assert response.was_running
        with pytest.raises(Cancelled):
            async for _ in call:
                pass
        await mesh.wait_idle()
        assert not (await mesh.stub.CancelAnswer(request)).was_running


async def test_answer_of_another_tenant_cannot_be_cancelled() -> None:
    target = TargetScript(script_of(TEXT), step_s=0.01)
    async with running_mesh(target) as mesh:
        call = mesh.open(tenant="a", policy=TARGET_ONLY)
        retrieval = (await call.read()).event.retrieval_done
        request = rag_pb2.CancelAnswerRequest(answer_id=retrieval.answer_id, tenant="b")
        assert not (await mesh.stub.CancelAnswer(request)).was_running
        last = [response async for response in call][-1]
        assert last.event.HasField("finished")


async def test_slow_client_holds_the_answer_back_and_loses_nothing() -> None:
    text = "word " * 400
    async with running_mesh(TargetScript(script_of(text))) as mesh:
        call = mesh.open(policy=TARGET_ONLY, sampling=common_pb2.SamplingParams(max_tokens=4096))
        await call.read()
        await asyncio.sleep(0.3)
        pieces = [response.event.commit.text async for response in call]
        assert "".join(pieces) == text
