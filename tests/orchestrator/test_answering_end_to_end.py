"""Answers through the real orchestrator over gRPC, the models scripted."""

from __future__ import annotations

import pytest
from specrag.v1 import common_pb2, rag_pb2

from tests.orchestrator.byte_tokenizer import TOKENIZER
from tests.orchestrator.mesh import make_passages, running_mesh
from tests.orchestrator.scripted_target import DraftScript, TargetScript, decode_ids, script_of

pytestmark = pytest.mark.integration

TARGET_ONLY = rag_pb2.ANSWER_POLICY_TARGET_ONLY
JOINT = rag_pb2.ANSWER_POLICY_JOINT
TEXT = "The answer is forty-two, as everybody knows by now."


async def test_target_only_streams_the_script() -> None:
    async with running_mesh(TargetScript(script_of(TEXT))) as mesh:
        answered = await mesh.ask(policy=TARGET_ONLY)
        finished = answered.finished
        assert answered.text == finished.answer == TEXT
        assert finished.policy == TARGET_ONLY
        assert finished.finish_reason == common_pb2.FINISH_REASON_STOP
        assert finished.usage.completion_tokens == len(TEXT) + 1
        assert finished.stats.num_bonus_tokens == len(TEXT) + 1
        assert decode_ids(finished.token_ids) == script_of(TEXT)


@pytest.mark.parametrize("policy", [TARGET_ONLY, JOINT])
async def test_answer_that_rests_on_no_passage_says_so(
    policy: rag_pb2.AnswerPolicy.ValueType,
) -> None:
    target = TargetScript(script_of(TEXT), max_passages=0)
    async with running_mesh(target, [DraftScript(script_of(TEXT))]) as mesh:
        finished = (await mesh.ask(policy=policy, passages=make_passages(2))).finished
        assert [(one.component, one.reason) for one in finished.degraded] == [
            ("retriever", "NO_PASSAGES")
        ]
        assert "2 passages" in finished.degraded[0].detail


async def test_joint_gives_the_tokens_of_target_only_in_fewer_rounds() -> None:
    drafts = [DraftScript(script_of(TEXT), wrong_every=11), DraftScript(script_of(TEXT))]
    async with running_mesh(TargetScript(script_of(TEXT)), drafts) as mesh:
        answered = await mesh.ask(passages=make_passages(4), include_speculative=True)
        finished = answered.finished
        assert answered.text == finished.answer == TEXT
        assert decode_ids(finished.token_ids) == script_of(TEXT)
        assert finished.policy == JOINT
        assert list(finished.degraded) == []
        stats = finished.stats
        assert stats.rounds < 12
        total = stats.num_accepted_tokens + stats.num_residual_tokens + stats.num_bonus_tokens
        assert total == finished.usage.completion_tokens == len(TEXT) + 1
        assert [list(one.passage_numbers) for one in stats.per_drafter] == [[1, 3], [2, 4]]
        assert answered.of_kind("speculative")


@pytest.mark.parametrize("wrong_every", [2, 3, 5, 7])
@pytest.mark.parametrize("stop", [[], ["日本"], ["👨‍👩‍👧", "🇩🇪"], ["。人口は"]])
async def test_cjk_and_emoji_replay_to_the_answer_with_rejections_in_mid_code_point(
    wrong_every: int, stop: list[str]
) -> None:
    text = "東京は😀首都🇩🇪です。人口は👨‍👩‍👧約一千四百万人、日本一。끝 naïve ✨"
    drafts = [
        DraftScript(script_of(text), wrong_every=wrong_every),
        DraftScript(script_of(text[3:])),
    ]
    async with running_mesh(TargetScript(script_of(text)), drafts) as mesh:
        answered = await mesh.ask(
            passages=make_passages(3),
            include_speculative=True,
            sampling=common_pb2.SamplingParams(stop=stop),
        )
        ends = [text.find(one) for one in stop if one in text]
        assert answered.text == answered.finished.answer == text[: min(ends, default=len(text))]
        ids = decode_ids(answered.finished.token_ids)
        assert TOKENIZER.decode(ids).startswith(answered.text)
        assert "\ufffd" not in answered.text
