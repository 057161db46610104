"""Having an answer decoded, by one policy or the other, from a composed reading."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag.v1 import common_pb2
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span
from specrag_common.speculation.acceptance import AcceptanceHistory
from specrag_common.speculation.controller import DEFAULT_MAX_BRANCHES
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.randomness import RANDOM_KEY_BYTES

from specrag_orchestrator.answering.draft_lines import DraftLine
from specrag_orchestrator.answering.draft_memory import DraftMemory
from specrag_orchestrator.answering.events import Degradation
from specrag_orchestrator.answering.inbox import new_inbox
from specrag_orchestrator.answering.joint import JointAnswer
from specrag_orchestrator.answering.plan import (
    find_gone_drafters,
    no_drafters_error,
    plan_drafters,
)
from specrag_orchestrator.answering.round_messages import RoundLimits
from specrag_orchestrator.answering.rounds import RoundMachine
from specrag_orchestrator.answering.stats import DrafterTally, find_late_drafters
from specrag_orchestrator.answering.target_only import answer_alone
from specrag_orchestrator.answering.waiting import DrafterPace
from specrag_orchestrator.conversation import select_subset, subset_numbers
from specrag_orchestrator.drafting import DraftingRequest, DraftStream
from specrag_orchestrator.question import AnswerPolicy
from specrag_orchestrator.target import GenerationStream, TargetRequest, VerificationStream

if TYPE_CHECKING:
    from specrag_orchestrator.answering.inbox import Inbox
    from specrag_orchestrator.answering.plan import DraftPlan
    from specrag_orchestrator.answering.progress import AnswerProgress
    from specrag_orchestrator.answering.resources import Resources
    from specrag_orchestrator.answering.stats import AnswerTally
    from specrag_orchestrator.conversation import Reading
    from specrag_orchestrator.drafters import Drafter
    from specrag_orchestrator.question import Question
    from specrag_orchestrator.target_model import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingTask:
    """Everything that decoding one answer needs.

    Attributes:
        question: as asked.
        reading: what is read.
        model: the target.
        answer_id: the answer.
        random_key: the key of the target's draws.
        memory: what earlier turns tell of the drafters.
        progress: receives what the target says.
        tally: the answer's figures.
    """

    question: Question
    reading: Reading
    model: TargetModel
    answer_id: str
    random_key: bytes
    memory: DraftMemory
    progress: AnswerProgress
    tally: AnswerTally


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """How an answer was really served.

    Attributes:
        policy: the policy.
        degraded: what did not work as asked.
        memory: what this and earlier turns tell of the drafters.
    """

    policy: AnswerPolicy
    degraded: tuple[Degradation, ...] = ()
    memory: DraftMemory = field(default_factory=DraftMemory)


async def decode_answer(task: DecodingTask, resources: Resources) -> Decoded:
    """Have the answer decoded; its events go through ``task.progress``.

    Raises:
        SpecragError: it cannot be decoded as asked.
        ContextShrunkError: the reading must be composed again.
    """
    match task.question.policy:
        case AnswerPolicy.TARGET_ONLY:
            return await _decode_alone(task, resources)
        case AnswerPolicy.JOINT:
            return await _decode_jointly(task, resources)


def derive_draft_key(random_key: bytes, mode: VerificationMode) -> bytes:
    """Return the key of the drafters' draws.

    COUPLED drafters share the target's. In REJECTION mode theirs is another one, from which the
    target's cannot be told: the draws that accept and reject never leave the verifier.
    """
    if mode is VerificationMode.COUPLED:
        return random_key
    return hashlib.blake2b(
        b"specrag draft key", key=random_key, digest_size=RANDOM_KEY_BYTES
    ).digest()


async def _decode_alone(task: DecodingTask, resources: Resources) -> Decoded:
    task.model.require(common_pb2.CAPABILITY_GENERATE)
    stream = GenerationStream(
        resources.verifier, _target_request(task), vocab_size=task.model.info.vocab_size
    )
    await answer_alone(stream, task.progress)
    return Decoded(policy=AnswerPolicy.TARGET_ONLY)


async def _decode_jointly(task: DecodingTask, resources: Resources) -> Decoded:
    task.model.require(common_pb2.CAPABILITY_VERIFY_TOKENS)
    plan = _plan(task, resources)
    inbox = new_inbox()
    draft_streams = {
        drafter.index: _draft_stream(task, plan, drafter, inbox) for drafter in plan.drafters
    }
    lines = [_draft_line(task, resources, plan, drafter) for drafter in plan.drafters]
    machine = RoundMachine(
        task.answer_id,
        lines,
        _limits(task.question, resources),
        step_costs=resources.step_costs,
        joint=task.memory.joint,
    )
    stream = VerificationStream(
        resources.verifier, _target_request(task), vocab_size=task.model.info.vocab_size
    )
    async with stream as target:
        answer = JointAnswer(
            machine,
            target,
            draft_streams,
            task.progress,
            inbox,
            allow_fallback=task.question.allow_fallback,
            clock=resources.clock,
        )
        await answer.run()
    late = find_late_drafters(task.tally.drafters, machine.owing_drafters)
    losses = tuple(answer.losses)
    losses += find_gone_drafters(plan.drafters, named={one.component for one in losses})
    lost = {one.component for one in losses}
    return Decoded(
        policy=AnswerPolicy.JOINT if machine.live_drafters else AnswerPolicy.TARGET_ONLY,
        degraded=(
            *plan.degraded,
            *losses,
            *(_late(task.tally.drafters[one]) for one in late if f"drafter-{one}" not in lost),
            *(() if machine.live_drafters else (_none_left(),)),
        ),
        memory=DraftMemory(
            histories={line.tally.address: line.history for line in lines}, joint=machine.joint
        ),
    )


def _plan(task: DecodingTask, resources: Resources) -> DraftPlan[Drafter]:
    """Choose the drafters.

    Raises:
        SpecragError: there is none, and the request may not do without.
    """
    attributes = {SpanKey.NUM_PASSAGES.value: len(task.reading.passages)}
    with span(SpanName.PARTITION, attributes):
        plan = plan_drafters(
            resources.drafters.drafters,
            task.question.draft,
            fingerprint=task.model.fingerprint,
            num_passages=len(task.reading.passages),
        )
    if not plan.drafters and not task.question.allow_fallback:
        raise no_drafters_error(plan)
    return plan


def _target_request(task: DecodingTask) -> TargetRequest:
    return TargetRequest(
        answer_id=task.answer_id,
        tenant=task.question.tenant,
        conversation=task.reading.conversation,
        sampling=task.question.sampling,
        mode=task.question.mode,
        random_key=task.random_key,
    )


def _draft_stream(
    task: DecodingTask, plan: DraftPlan[Drafter], drafter: Drafter, inbox: Inbox
) -> DraftStream:
    subset_idx = plan.drafters.index(drafter)
    request = DraftingRequest(
        answer_id=task.answer_id,
        drafter_index=drafter.index,
        tenant=task.question.tenant,
        conversation=select_subset(task.reading, subset_idx, len(plan.drafters)),
        sampling=task.question.sampling,
        mode=task.question.mode,
        random_key=derive_draft_key(task.random_key, task.question.mode),
        sources=task.question.draft.sources,
        tokenizer_fingerprint=task.model.fingerprint,
    )
    return DraftStream(drafter, request, inbox, vocab_size=task.model.info.vocab_size)


def _draft_line(
    task: DecodingTask, resources: Resources, plan: DraftPlan[Drafter], drafter: Drafter
) -> DraftLine:
    tally = DrafterTally(
        drafter_index=drafter.index,
        address=drafter.address,
        passage_numbers=subset_numbers(
            task.reading, plan.drafters.index(drafter), len(plan.drafters)
        ),
    )
    task.tally.drafters[drafter.index] = tally
    history = task.memory.histories.get(drafter.address)
    return DraftLine(
        index=drafter.index,
        tally=tally,
        history=history or AcceptanceHistory.begin(task.question.sampling.temperature),
        pace=resources.paces.setdefault(drafter.address, DrafterPace()),
    )


def _limits(question: Question, resources: Resources) -> RoundLimits:
    tuning = resources.tuning
    return RoundLimits(
        max_tokens=question.sampling.max_tokens,
        max_gamma=question.draft.max_gamma or tuning.max_gamma,
        max_branches=question.draft.num_branches or DEFAULT_MAX_BRANCHES,
        max_draft_tokens=tuning.max_draft_tokens,
        waits=tuning.waits,
    )


def _late(tally: DrafterTally) -> Degradation:
    return Degradation(
        component=f"drafter-{tally.drafter_index}",
        reason="LATE",
        detail=f"left out of {tally.num_late_rounds} of {tally.num_asked_rounds} rounds",
    )


def _none_left() -> Degradation:
    return Degradation(
        component="drafters", reason="NO_DRAFTERS", detail="the target decoded alone"
    )
