"""Many requests at once: how decoding scales, and that drafting never costs throughput.

Usage: python -m bench.concurrency [--data FOLDER] [--pairs 5] [--levels 1 2 4 8 16 32]
       [--tokens 48] [--temperature 0] [--seeded] [--quick] [--out RESULT.json]

A verifier, two suffix drafters and an orchestrator run as processes of their own on the bundled
model. Every prompt is read once first, so that what is measured is decoding. At every level, that
many questions are asked at the same moment, with drafting (JOINT) and without (TARGET_ONLY), in
interleaved pairs whose order alternates. Tokens a second: all answers' tokens over the time from
the first question sent to the last answer's end. Intervals are those of the mean of the pairs'
ratios, 95 percent, Student's t. ``FOLDER`` holds ``hotpotqa.jsonl``; without it the example
handbook's questions are asked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scipy import stats
from specrag.v1 import common_pb2, rag_pb2, rag_pb2_grpc
from specrag_common.runtime.channels import open_channel

from bench.question_sets import load_handbook, load_questions
from bench.results import (
    BenchResult,
    ResultRow,
    at_least,
    describe_command,
    describe_machine,
    format_rows,
    write_result,
)
from bench.services import ServicePlan, running_services

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.question_sets import ClosedQuestion

NUM_PROMPTS: Final = 8
NUM_DRAFTERS: Final = 2
TIMEOUT_S: Final = 300.0
SCALING_LEVEL: Final = 16
SCALING_BAR: Final = 3.0
DRAFTING_BAR: Final = 0.95

OFF: Final = rag_pb2.ANSWER_POLICY_TARGET_ONLY
ON: Final = rag_pb2.ANSWER_POLICY_JOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How questions are asked.

    Attributes:
        max_tokens: of every answer; what would end one earlier is ruled out.
        temperature: of the law.
        is_seeded: every request carries a seed: COUPLED mode.
    """

    max_tokens: int
    temperature: float = 0.0
    is_seeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What was measured at one concurrency: tokens a second, pair by pair."""

    num_requests: int
    with_drafts: tuple[float, ...]
    alone: tuple[float, ...]
    accepted_a_round: float

    @property
    def ratios(self) -> list[float]:
        """With drafts over alone, pair by pair."""
        return [on / off for on, off in zip(self.with_drafts, self.alone, strict=True)]

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 percent interval of the mean ratio."""
        ratios = self.ratios
        if len(ratios) < 2:
            return (ratios[0], ratios[0])
        half = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
        mean = statistics.mean(ratios)
        return (mean - half, mean + half)


class Crowd:
    """Asks many questions at the same moment."""

    def __init__(
        self,
        stub: rag_pb2_grpc.RagServiceAsyncStub,
        questions: Sequence[ClosedQuestion],
        load: Load,
    ) -> None:
        self._stub = stub
        self._questions = questions
        self._load = load

    async def warm_up(self) -> None:
        """Have every prompt read once; the last answers also teach what passes cost."""
        for question in self._questions:
            await self._ask(question, OFF, seed=1)
        for question in self._questions[:2]:
            await self._ask(question, ON, seed=1)

    async def ask(self, num_requests: int, policy: int) -> tuple[float, list[rag_pb2.Finished]]:
        """Return tokens a second over all answers, and how each ended."""
        began = time.perf_counter()
        finished = await asyncio.gather(
            *(
                self._ask(question, policy, seed=seed)
                for seed, question in zip(
                    range(num_requests), itertools.cycle(self._questions), strict=False
                )
            )
        )
        seconds = time.perf_counter() - began
        num_tokens = sum(one.usage.completion_tokens for one in finished)
        return num_tokens / seconds, list(finished)

    async def _ask(self, question: ClosedQuestion, policy: int, *, seed: int) -> rag_pb2.Finished:
        load = self._load
        request = rag_pb2.AnswerRequest(
            question=question.question,
            policy=policy,  # type: ignore[arg-type]  # an enum value
            sampling=common_pb2.SamplingParams(
                temperature=load.temperature,
                max_tokens=load.max_tokens,
                min_tokens=load.max_tokens,
            ),
            seed=seed if load.is_seeded else None,
            passages=question.passages,
        )
        finished = None
        async for response in self._stub.Answer(request, timeout=TIMEOUT_S):
            if response.event.HasField("finished"):
                finished = response.event.finished
        assert finished is not None, f"{question.question_id}: the stream ended without Finished"
        # A full machine makes drafters late; anything else would make the figures meaningless.
        faults = [one for one in finished.degraded if one.reason != "LATE"]
        assert not faults, f"{question.question_id}: degraded {faults}"
        return finished


async def measure_level(crowd: Crowd, num_requests: int, num_pairs: int) -> Level:
    """Measure pairs of batches at one concurrency; which goes first alternates."""
    rates: dict[int, list[float]] = {ON: [], OFF: []}
    accepted = rounds = 0
    for pair in range(num_pairs):
        for policy in (ON, OFF) if pair % 2 else (OFF, ON):
            rate, finished = await crowd.ask(num_requests, policy)
            rates[policy].append(rate)
            if policy == ON:
                accepted += sum(one.stats.num_accepted_tokens for one in finished)
                rounds += sum(one.stats.rounds for one in finished)
    return Level(
        num_requests=num_requests,
        with_drafts=tuple(rates[ON]),
        alone=tuple(rates[OFF]),
        accepted_a_round=accepted / max(1, rounds),
    )


def describe(level: Level) -> str:
    """Return one line of the table."""
    low, high = level.interval
    return (
        f"{level.num_requests:8}  {statistics.median(level.alone):8.1f}  "
        f"{statistics.median(level.with_drafts):8.1f}  {statistics.mean(level.ratios):6.3f} "
        f"[{low:.3f}, {high:.3f}]  {1 + level.accepted_a_round:.2f}"
    )


def judge(levels: Sequence[Level]) -> list[ResultRow]:
    """Return the figures beside their bars."""
    rows = []
    by_size = {level.num_requests: level for level in levels}
    if {1, SCALING_LEVEL} <= by_size.keys():
        one, many = (statistics.median(by_size[size].alone) for size in (1, SCALING_LEVEL))
        what = f"decode tokens/s, {SCALING_LEVEL} requests over one, without drafts"
        rows.append(at_least(what, many / one, SCALING_BAR))
    for level in levels:
        low, high = level.interval
        name = f"{level.num_requests} at once"
        mean = statistics.mean(level.ratios)
        rows.append(at_least(f"throughput with drafting over without, {name}", mean, DRAFTING_BAR))
        rows.append(ResultRow(what=f"95 % interval, {name}", value=f"{low:.3f} to {high:.3f}"))
    return rows


async def run(arguments: argparse.Namespace) -> list[ResultRow]:
    """Start the services, measure every level, return the rows."""
    if arguments.data is None:
        questions = load_handbook(num_passages=6)[:NUM_PROMPTS]
    else:
        questions = load_questions(arguments.data, "hotpotqa", limit=NUM_PROMPTS)
    load = Load(
        max_tokens=arguments.tokens,
        temperature=arguments.temperature,
        is_seeded=arguments.seeded,
    )
    plan = ServicePlan(
        num_drafters=NUM_DRAFTERS,
        with_orchestrator=True,
        model=arguments.model,
        verifier={"NUM_THREADS": str(arguments.threads), "KV_CACHE_MIB": "1024"},
    )
    levels = []
    async with running_services(plan) as services, open_channel(services.orchestrator) as channel:
        crowd = Crowd(rag_pb2_grpc.RagServiceStub(channel), questions, load)
        await crowd.warm_up()
        print("requests  alone t/s  joint t/s  ratio  [95 %]          tokens a pass", flush=True)
        for num_requests in arguments.levels:
            level = await measure_level(crowd, num_requests, arguments.pairs)
            levels.append(level)
            print(describe(level), flush=True)
    return judge(levels)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seeded", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="", help="default: the bundled target")
    parser.add_argument("--quick", action="store_true", help="2 pairs at 1, 4 and 16")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs, arguments.levels = 2, [1, 4, 16]
    rows = asyncio.run(run(arguments))
    print(format_rows(rows))
    if arguments.out:
        model = arguments.model or "bundled model"
        conditions = (
            f"{model}, {arguments.threads} threads, {arguments.tokens} tokens an answer, "
            f"temperature {arguments.temperature:g}; {describe_machine()}"
        )
        write_result(
            arguments.out,
            BenchResult(
                name="concurrency",
                rows=tuple(rows),
                command=describe_command("bench.concurrency"),
                conditions=conditions,
            ),
        )


if __name__ == "__main__":
    main()
