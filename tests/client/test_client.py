"""The Python client against a scripted orchestrator."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest
from specrag.v1 import common_pb2, rag_pb2
from specrag_client import (
    AnswerOptions,
    AnswerText,
    Finished,
    Policy,
    RetrievalDone,
    SpecragClient,
)
from specrag_client.addresses import AddressError
from specrag_common.runtime.errors import (
    DataLoss,
    InvalidRequest,
    NotFound,
    SessionBusy,
    UpstreamUnavailable,
)

if TYPE_CHECKING:
    from specrag_client.events import AnswerEvent

    from tests.client.conftest import RagScript


async def test_answer_yields_every_event_in_order(orchestrator: str) -> None:
    events: list[AnswerEvent] = []
    async with SpecragClient(orchestrator) as client:
        async for event in client.answer("Who?", collection="handbook"):
            events.append(event)  # noqa: PERF401 - reads like the caller's code
    assert [event.seq for event in events] == list(range(1, 10))
    assert isinstance(events[0], RetrievalDone)
    assert events[0].passages[0].title == "Annual leave"
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert finished.token_ids == (5, 6, 7)
    assert finished.random_key == bytes(range(16)).hex()


async def test_replayed_events_equal_the_final_answer(orchestrator: str) -> None:
    text = AnswerText()
    async with SpecragClient(orchestrator) as client:
        async for event in client.answer("Who?", collection="handbook"):
            text.apply(event)
    assert text.committed == "猫が🐟を食べる"
    assert text.speculative == ""


async def test_ask_returns_the_whole_answer(orchestrator: str) -> None:
    async with SpecragClient(orchestrator) as client:
        result = await client.ask("Who?", collection="handbook")
    assert result.answer == "猫が🐟を食べる"
    assert [one.document_id for one in result.citations] == ["leave.md"]
    assert result.finished.policy is Policy.JOINT


async def test_request_leaves_absent_what_is_not_chosen(
    orchestrator: str, rag_script: RagScript
) -> None:
    async with SpecragClient(orchestrator) as client:
        await client.ask("Who?", collection="handbook")
    request = rag_script.requests[0]
    assert not request.HasField("seed")
    assert request.sampling == common_pb2.SamplingParams()
    assert not request.HasField("num_passages")
    assert not request.draft.HasField("num_drafters")
    assert not request.include_speculative


async def test_request_carries_every_choice(orchestrator: str, rag_script: RagScript) -> None:
    options = AnswerOptions(
        tenant="acme",
        session_id="s1",
        policy=Policy.TARGET_ONLY,
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: 1.0},
        max_tokens=9,
        min_tokens=2,
        stop=("\n\n",),
        num_top_logprobs=4,
        seed=0,
        num_passages=3,
        num_drafters=2,
        request_id="r1",
        allow_fallback=False,
    )
    async with SpecragClient(orchestrator) as client:
        await client.ask("Who?", collection="handbook", options=options)
    assert rag_script.requests[0] == rag_pb2.AnswerRequest(
        question="Who?",
        collection="handbook",
        tenant="acme",
        session_id="s1",
        policy=rag_pb2.ANSWER_POLICY_TARGET_ONLY,
        sampling=common_pb2.SamplingParams(
            temperature=0.0,
            top_p=0.5,
            top_k=7,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias={3: 1.0},
            max_tokens=9,
            min_tokens=2,
            stop=["\n\n"],
            num_top_logprobs=4,
        ),
        seed=0,
        num_passages=3,
        draft=rag_pb2.DraftOptions(num_drafters=2),
        request_id="r1",
        allow_fallback=False,
    )


async def test_leaving_the_iterator_cancels_the_call(
    orchestrator: str, rag_script: RagScript
) -> None:
    rag_script.hold = rag_script.left
    async with SpecragClient(orchestrator) as client:
        stream = client.answer("Who?", collection="handbook")
        async with aclosing(stream):
            async for event in stream:
                if event.seq == 3:
                    break
        assert rag_script.left.wait(5)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("question", "it is blank"),
        NotFound("no collection named x"),
        SessionBusy("session s1 has a running turn", retry_delay_s=1.5),
    ],
)
async def test_errors_of_the_service_arrive_as_raised(
    orchestrator: str, rag_script: RagScript, error: NotFound
) -> None:
    rag_script.events, rag_script.error = [retrieval_only(rag_script)], error
    async with SpecragClient(orchestrator) as client:
        with pytest.raises(type(error), match=error.message) as caught:
            await client.ask("Who?", collection="x")
    assert caught.value.retry_delay_s == error.retry_delay_s


async def test_stream_without_an_end_is_data_loss(orchestrator: str, rag_script: RagScript) -> None:
    rag_script.events.pop()
    async with SpecragClient(orchestrator) as client:
        with pytest.raises(DataLoss, match="before the answer was finished"):
            await client.ask("Who?", collection="handbook")


async def test_text_unlike_the_final_answer_is_data_loss(
    orchestrator: str, rag_script: RagScript
) -> None:
    rag_script.events[-1].finished.answer = "something else"
    async with SpecragClient(orchestrator) as client:
        with pytest.raises(DataLoss, match="differs"):
            await client.ask("Who?", collection="handbook")


async def test_unreachable_service_is_unavailable() -> None:
    async with SpecragClient("127.0.0.1:1") as client:
        with pytest.raises(UpstreamUnavailable):
            await client.ask("Who?", collection="handbook")


@pytest.mark.parametrize(
    "endpoint", ["", "host", ":50051", "host:0", "host:70000", "http://host:1", "::1:50051", "h:٣"]
)
def test_bad_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(AddressError):
        SpecragClient(endpoint)


def retrieval_only(script: RagScript) -> rag_pb2.AnswerEvent:
    return script.events[0]
