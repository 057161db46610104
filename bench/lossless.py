"""JOINT against TARGET_ONLY on closed questions: the same tokens, and how much faster.

Usage: python -m bench.lossless [--data FOLDER] [--endpoint HOST:PORT] [--hotpotqa 50]
       [--techqa 20] [--seeded 20] [--out RESULT.json]

``FOLDER`` holds ``hotpotqa.jsonl`` and ``techqa.jsonl``; without it the example handbook's
questions are asked. Without ``--endpoint`` a stack is started and stopped. Every question is
answered twice at temperature 0 and ``--seeded`` of them twice more at temperature 1 with a seed;
which policy goes first alternates. Answers are written to ``--out`` for ``bench.near_ties``, which
judges those that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from specrag.v1 import common_pb2, rag_pb2, rag_pb2_grpc
from specrag_client.stack.launcher import StackLauncher
from specrag_client.stack.options import StackOptions
from specrag_common.runtime.channels import open_channel

from bench.question_sets import ClosedQuestion, load_handbook, load_questions

HANDBOOK_PASSAGES = 6
DIRECTORY = Path(".specrag/bench")

POLICIES = {
    "target_only": rag_pb2.ANSWER_POLICY_TARGET_ONLY,
    "joint": rag_pb2.ANSWER_POLICY_JOINT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One answer's tokens and figures."""

    token_ids: list[int]
    rounds: int
    num_accepted_tokens: int
    num_draft_tokens: int
    decode_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One question answered under both policies."""

    question_id: str
    seed: int | None
    target_only: Measured
    joint: Measured

    @property
    def is_identical(self) -> bool:
        """Whether both policies gave the same tokens."""
        return self.target_only.token_ids == self.joint.token_ids


async def answer(
    stub: rag_pb2_grpc.RagServiceAsyncStub,
    question: ClosedQuestion,
    *,
    policy: str,
    seed: int | None,
    max_tokens: int,
) -> Measured:
    """Ask once and return what ``Finished`` reports."""
    request = rag_pb2.AnswerRequest(
        question=question.question,
        policy=POLICIES[policy],
        sampling=common_pb2.SamplingParams(
            temperature=0.0 if seed is None else 1.0, max_tokens=max_tokens
        ),
        seed=seed,
        passages=question.passages,
    )
    finished = None
    async for response in stub.Answer(request, timeout=300):
        if response.event.HasField("finished"):
            finished = response.event.finished
    assert finished is not None, f"{question.question_id}: the stream ended without Finished"
    assert not finished.degraded, f"{question.question_id}: degraded {finished.degraded}"
    stats = finished.stats
    return Measured(
        token_ids=np.frombuffer(finished.token_ids, dtype="<i4").tolist(),
        rounds=stats.rounds,
        num_accepted_tokens=stats.num_accepted_tokens,
        num_draft_tokens=stats.num_draft_tokens,
        decode_ms=stats.decode_ms,
        total_ms=stats.total_ms,
    )


async def measure_pair(
    stub: rag_pb2_grpc.RagServiceAsyncStub,
    question: ClosedQuestion,
    *,
    seed: int | None,
    max_tokens: int,
    joint_first: bool,
) -> Pair:
    """Answer under both policies, one after the other."""
    order = ("joint", "target_only") if joint_first else ("target_only", "joint")
    measured = {
        policy: await answer(stub, question, policy=policy, seed=seed, max_tokens=max_tokens)
        for policy in order
    }
    return Pair(question_id=question.question_id, seed=seed, **measured)


def _load(arguments: argparse.Namespace) -> list[ClosedQuestion]:
    if arguments.data is None:
        return load_handbook(num_passages=HANDBOOK_PASSAGES)
    return [
        question
        for name, limit in (("hotpotqa", arguments.hotpotqa), ("techqa", arguments.techqa))
        for question in load_questions(arguments.data, name, limit=limit)
    ]


async def run(arguments: argparse.Namespace) -> list[Pair]:
    """Measure against ``--endpoint``, or against a stack of its own."""
    if arguments.endpoint:
        return await measure_all(arguments, arguments.endpoint)
    launcher = StackLauncher(StackOptions(directory=DIRECTORY, foreground=True), print)
    record = await launcher.start()
    try:
        return await measure_all(arguments, record.endpoint)
    finally:
        await launcher.stop()


async def measure_all(arguments: argparse.Namespace, endpoint: str) -> list[Pair]:
    """Answer all questions under both policies."""
    questions = _load(arguments)
    tasks: list[tuple[ClosedQuestion, int | None]] = [(question, None) for question in questions]
    step = max(1, len(questions) // max(1, arguments.seeded))
    tasks += [(question, 7 + i) for i, question in enumerate(questions[::step][: arguments.seeded])]
    pairs = []
    async with open_channel(endpoint) as channel:
        stub = rag_pb2_grpc.RagServiceStub(channel)
        for i, (question, seed) in enumerate(tasks):
            pair = await measure_pair(
                stub,
                question,
                seed=seed,
                max_tokens=arguments.max_tokens,
                joint_first=bool(i % 2),
            )
            pairs.append(pair)
            print(_line(pair), flush=True)
    return pairs


def _line(pair: Pair) -> str:
    length = 1 + pair.joint.num_accepted_tokens / max(1, pair.joint.rounds)
    return (
        f"{pair.question_id:36} seed={pair.seed!s:5} tokens={len(pair.joint.token_ids):3} "
        f"{'same' if pair.is_identical else 'DIFFERENT':9} acceptance_length={length:.2f} "
        f"decode_ms joint={pair.joint.decode_ms:.0f} target_only={pair.target_only.decode_ms:.0f}"
    )


def summarise(pairs: list[Pair]) -> str:
    """Return the table of greedy and seeded answers."""
    rows = []
    for name, chosen in (
        ("temperature 0", [pair for pair in pairs if pair.seed is None]),
        ("temperature 1, seeded", [pair for pair in pairs if pair.seed is not None]),
    ):
        if not chosen:
            continue
        accepted = sum(pair.joint.num_accepted_tokens for pair in chosen)
        rounds = sum(pair.joint.rounds for pair in chosen)
        joint_ms = sum(pair.joint.decode_ms for pair in chosen)
        target_ms = sum(pair.target_only.decode_ms for pair in chosen)
        ratios = [pair.joint.decode_ms / pair.target_only.decode_ms for pair in chosen]
        rows.append(
            f"{name}: {sum(pair.is_identical for pair in chosen)} of {len(chosen)} identical; "
            f"mean acceptance length {1 + accepted / rounds:.3f}; decode time JOINT "
            f"{joint_ms / 1000:.1f} s, TARGET_ONLY {target_ms / 1000:.1f} s, ratio "
            f"{joint_ms / target_ms:.3f} (median of questions {statistics.median(ratios):.3f})"
        )
    return "\n".join(rows)


def main() -> None:
    """Run, print the table, write the pairs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--endpoint")
    parser.add_argument("--hotpotqa", type=int, default=50)
    parser.add_argument("--techqa", type=int, default=20)
    parser.add_argument("--seeded", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    pairs = asyncio.run(run(arguments))
    print(summarise(pairs))
    if arguments.out:
        arguments.out.write_text(json.dumps([asdict(pair) for pair in pairs], indent=1))


if __name__ == "__main__":
    main()
