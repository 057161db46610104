"""Answers one request with an engine in this process, no services between.

JOINT is driven by the orchestrator's own round machine, with suffix drafters that answer at once;
what is missing beside the real mesh is the messages.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specrag_common.speculation.proposals import DraftProposal
from specrag_common.speculation.suffix_drafter import SuffixDrafter
from specrag_common.speculation.token_tree import TokenTree
from specrag_common.wire.proposals import KeyedProposal
from specrag_common.wire.verified import AnswerEnd, VerifiedTokens
from specrag_inference.messages import (
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    SequenceFailed,
    SequenceOpened,
    VerifyTree,
)
from specrag_orchestrator.answering.draft_lines import DraftLine
from specrag_orchestrator.answering.round_messages import RoundLimits
from specrag_orchestrator.answering.rounds import RoundMachine
from specrag_orchestrator.answering.stats import DrafterTally

from bench.peers.child import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from specrag_common.speculation.step_costs import StepCosts
    from specrag_inference.engine import Engine
    from specrag_inference.messages import EngineEvent
    from specrag_orchestrator.answering.round_messages import DraftCall, RoundStep, VerifyCall

    from bench.peers.child import Answer

SEQUENCE_ID = "answer"


class EngineRefusedError(Exception):
    """The engine failed the sequence; its message says why."""


def answer_alone(
    engine: Engine, prompt_ids: Sequence[int], *, max_tokens: int, cache_scope: bytes
) -> Answer:
    """Decode ``max_tokens`` greedily, one a pass; an end-of-sequence token ends nothing."""
    watch = Stopwatch()
    _open(engine, prompt_ids, max_tokens, cache_scope)
    engine.submit(
        VerifyTree(
            sequence_id=SEQUENCE_ID,
            round=0,
            tree=TokenTree.empty(),
            free_run_tokens=max_tokens - 1,
        )
    )
    for verified in _run(engine):
        watch.note([token.token_id for token in verified.tokens])
    answer = watch.stop()
    engine.submit(FreeSequence(sequence_id=SEQUENCE_ID))
    return answer


def answer_jointly(
    engine: Engine,
    prompt_ids: Sequence[int],
    subset_ids: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    cache_scope: bytes,
    step_costs: StepCosts | None = None,
) -> Answer:
    """Decode ``max_tokens`` greedily with one suffix drafter a subset.

    Args:
        engine: serves the target.
        prompt_ids: what the target reads.
        subset_ids: what each drafter reads.
        max_tokens: of the answer; an end-of-sequence token ends nothing.
        cache_scope: a fresh one for a cold prefill.
        step_costs: what passes cost, from earlier answers.
    """
    watch = Stopwatch()
    _open(engine, prompt_ids, max_tokens, cache_scope)
    lines = [
        DraftLine(index=idx, tally=DrafterTally(drafter_index=idx, address=f"drafter-{idx}"))
        for idx in range(len(subset_ids))
    ]
    machine = RoundMachine(
        SEQUENCE_ID, lines, RoundLimits(max_tokens=max_tokens), step_costs=step_costs
    )
    rounds = _JointRounds(machine, [SuffixDrafter(ids) for ids in subset_ids])
    call = rounds.begin()
    while call is not None:
        engine.submit(
            VerifyTree(
                sequence_id=SEQUENCE_ID,
                round=call.key.round,
                tree=call.tree,
                free_run_tokens=call.free_run_tokens,
            )
        )
        verify_call, call = call, None
        for verified in _run(engine):
            watch.note([token.token_id for token in verified.tokens])
            call = rounds.advance(verify_call, verified)
    answer = watch.stop()
    engine.submit(FreeSequence(sequence_id=SEQUENCE_ID))
    return answer


class _JointRounds:
    """The round machine and its drafters; a drafter's answer is there as soon as it is asked."""

    def __init__(self, machine: RoundMachine, drafters: Sequence[SuffixDrafter]) -> None:
        self._machine = machine
        self._drafters = drafters

    def begin(self) -> VerifyCall | None:
        """Return the first call to the target."""
        return self._carry_out(self._machine.begin(time.perf_counter()))

    def advance(self, call: VerifyCall, verified: RoundVerified) -> VerifyCall | None:
        """Tell the machine what was verified; return the next call, if one is due."""
        step = self._machine.on_verified(_to_wire(call, verified), time.perf_counter())
        return self._carry_out(step)

    def _carry_out(self, step: RoundStep) -> VerifyCall | None:
        verify_call = step.verify_call
        for draft_call in step.draft_calls:
            keyed = self._propose(draft_call)
            answered = self._machine.on_proposal(keyed, time.perf_counter())
            verify_call = answered.verify_call or verify_call
        return verify_call

    def _propose(self, call: DraftCall) -> KeyedProposal:
        began = time.perf_counter()
        drafter = self._drafters[call.drafter_index]
        drafter.extend(call.committed_token_ids)
        proposal = DraftProposal(
            drafter_index=call.drafter_index,
            committed_length=call.key.committed_length,
            branches=tuple(
                drafter.propose(call.gamma, call.num_branches, min_probability=call.min_probability)
            ),
            gamma=call.gamma,
        )
        draft_time_us = int((time.perf_counter() - began) * 1e6)
        return KeyedProposal(key=call.key, proposal=proposal, draft_time_us=draft_time_us)


def _open(engine: Engine, prompt_ids: Sequence[int], max_tokens: int, cache_scope: bytes) -> None:
    """Return once the prompt is in the cache."""
    engine.submit(
        OpenSequence(
            sequence_id=SEQUENCE_ID,
            prompt_token_ids=tuple(prompt_ids),
            cache_scope=cache_scope,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
    )
    while not any(isinstance(event, SequenceOpened) for event in _step(engine)):
        pass


def _run(engine: Engine) -> Iterator[RoundVerified]:
    """Step the engine until the round has ended; yield what was verified."""
    while True:
        for event in _step(engine):
            if isinstance(event, RoundVerified):
                yield event
                if event.last:
                    return


def _step(engine: Engine) -> list[EngineEvent]:
    """Run one step; a failed sequence raises."""
    events = engine.step()
    for event in events:
        if isinstance(event, SequenceFailed):
            raise EngineRefusedError(f"{event.code}: {event.message}")
    return events


def _to_wire(call: VerifyCall, verified: RoundVerified) -> VerifiedTokens:
    """Return the event as the verifier's stream tells it."""
    tokens = verified.tokens
    return VerifiedTokens(
        key=call.key,
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=tuple(token.logprob for token in tokens),
        accepted_node_idx=tuple(token.node_idx for token in tokens if token.node_idx is not None),
        has_bonus=bool(tokens) and tokens[-1].is_bonus,
        end=None if verified.finish_reason is None else AnswerEnd.LENGTH,
        stop_text_length=None,
        forward_time_us=int(verified.forward_s * 1e6),
        is_last_of_round=verified.last,
    )
