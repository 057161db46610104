"""JOINT against TARGET_ONLY over real engines with tiny random fp32 models."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
from specrag.v1 import common_pb2, rag_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_serving.testing import wait_freed

from tests.orchestrator.mesh import Answered, make_passage, make_passages, make_request
from tests.orchestrator.real_mesh import JOINT, TARGET_ONLY, RealMesh, running_real_mesh
from tests.orchestrator.scripted_target import decode_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.integration,
    pytest.mark.congruence,
    pytest.mark.asyncio(loop_scope="module"),
]

SUFFIX, MODEL = common_pb2.DRAFT_SOURCE_SUFFIX, common_pb2.DRAFT_SOURCE_MODEL
SOURCES = [[SUFFIX], [MODEL], [SUFFIX, MODEL]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealMesh]:
    async with running_real_mesh(tmp_path_factory.mktemp("models")) as running:
        yield running


def make_fields(**changes: Any) -> dict[str, Any]:
    sampling = common_pb2.SamplingParams(
        temperature=changes.pop("temperature", 0.0), max_tokens=40, top_p=0.9
    )
    return {"passages": make_passages(4), "sampling": sampling, **changes}


@pytest.mark.parametrize("sources", SOURCES)
@pytest.mark.parametrize("law", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
async def test_joint_gives_the_very_tokens_of_target_only(
    mesh: RealMesh, law: dict[str, Any], sources: list[common_pb2.DraftSource.ValueType]
) -> None:
    alone = (await mesh.ask(policy=TARGET_ONLY, **make_fields(**law))).finished
    options = rag_pb2.DraftOptions(sources=sources, num_branches=2)
    joint = await mesh.ask(
        policy=JOINT, draft=options, include_speculative=True, **make_fields(**law)
    )
    finished = joint.finished
    assert decode_ids(finished.token_ids) == decode_ids(alone.token_ids)
    assert finished.answer == alone.answer == joint.text
    assert finished.policy == JOINT
    assert [one for one in finished.degraded if one.reason != "LATE"] == []
    assert finished.mode == alone.mode
    stats = finished.stats
    parts = stats.num_accepted_tokens + stats.num_residual_tokens + stats.num_bonus_tokens
    assert parts == finished.usage.completion_tokens == len(decode_ids(alone.token_ids))


SAMPLINGS = [
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"logit_bias": {101: 4.0, 32: -100.0}},
    {"min_tokens": 30, "stop": ["e", " "]},
]


@pytest.mark.parametrize("fields", SAMPLINGS, ids="+".join)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_parameter_gives_the_very_tokens_and_log_probs_of_target_only(
    mesh: RealMesh, temperature: float, fields: dict[str, Any]
) -> None:
    sampling = common_pb2.SamplingParams(
        temperature=temperature, max_tokens=40, num_top_logprobs=2, **fields
    )
    request = {"passages": make_passages(4), "sampling": sampling, "seed": 11}
    alone = await mesh.ask(policy=TARGET_ONLY, **request)
    options = rag_pb2.DraftOptions(sources=[SUFFIX, MODEL], num_branches=2)
    joint = await mesh.ask(policy=JOINT, draft=options, include_speculative=True, **request)
    token_ids = decode_ids(joint.finished.token_ids)
    assert token_ids == decode_ids(alone.finished.token_ids)
    assert joint.text == joint.finished.answer == alone.finished.answer
    for one, other in zip(list_logprobs(joint), list_logprobs(alone), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert 1 <= len(one.top) <= 2
    assert [one.token_id for one in list_logprobs(joint)] == token_ids


async def test_log_probs_are_sent_to_those_who_ask(mesh: RealMesh) -> None:
    asked = common_pb2.SamplingParams(max_tokens=8, num_top_logprobs=0)
    answered = await mesh.ask(passages=make_passages(2), sampling=asked)
    logprobs = list_logprobs(answered)
    assert len(logprobs) == answered.finished.usage.completion_tokens
    assert all(one.logprob < 0 and not one.top for one in logprobs)
    others = common_pb2.SamplingParams(max_tokens=8)
    assert not list_logprobs(await mesh.ask(passages=make_passages(2), sampling=others))


async def test_bias_for_a_token_the_target_lacks_is_the_callers_fault(mesh: RealMesh) -> None:
    sampling = common_pb2.SamplingParams(logit_bias={100_000: 1.0})
    with pytest.raises(InvalidRequest) as caught:
        await mesh.ask(passages=make_passages(2), sampling=sampling)
    assert [one.field for one in caught.value.violations] == ["sampling.logit_bias[100000]"]


def list_logprobs(answered: Answered) -> list[rag_pb2.TokenLogprob]:
    """Return the entries of all events; each event says where it begins."""
    entries: list[rag_pb2.TokenLogprob] = []
    for event in answered.of_kind("token_logprobs"):
        assert event.first_token == len(entries)
        entries += event.tokens
    return entries


async def test_rejection_at_a_temperature_needs_no_seed(mesh: RealMesh) -> None:
    options = rag_pb2.DraftOptions(sources=[SUFFIX, MODEL], num_branches=2)
    answers = [
        (await mesh.ask(draft=options, **make_fields(temperature=1.0))).finished for _ in range(3)
    ]
    assert {one.mode for one in answers} == {common_pb2.VERIFICATION_MODE_REJECTION}
    assert len({one.random_key for one in answers}) == 3


async def test_many_answers_at_once_are_what_they_are_alone(mesh: RealMesh) -> None:
    def fields(number: int) -> dict[str, Any]:
        passages = [make_passage(f"c{number}-{idx}", f"Text {number} {idx}.") for idx in range(3)]
        return {**make_fields(temperature=1.0, seed=number), "passages": passages}

    alone = [(await mesh.ask(policy=TARGET_ONLY, **fields(one))).finished for one in range(6)]
    crowd = await asyncio.gather(*(mesh.ask(**fields(one)) for one in range(6)))
    for one, other in zip(alone, crowd, strict=True):
        assert decode_ids(other.finished.token_ids) == decode_ids(one.token_ids)


async def test_client_that_leaves_frees_every_block(mesh: RealMesh) -> None:
    for number in range(5):
        call: Any = mesh.stub.Answer(make_request(**make_fields(seed=number)))
        await call.read()
        if number % 2:
            await call.read()
        call.cancel()
    for service in (mesh.verifier, *mesh.drafters):
        await wait_freed(service, timeout_s=1.5)
