"""A round outside the forward pass: drafting, merging, messages, mask, law and walk.

Usage: python -m bench.overhead [--rounds 120] [--quick] [--out RESULT.json]

A verifier and four suffix drafters run as processes of their own on the bundled model. A driver in
this process speaks to them as the orchestrator does: it asks every drafter for eight tokens, merges
the four branches into a tree filled up to 32 different nodes, and has it verified. What a round
took less the forward pass that the verifier reports is its overhead. Once at temperature 0, once at
temperature 1 with top-p 0.9; each a fresh answer with the prompt in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from specrag.v1 import verifier_pb2_grpc
from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.runtime.channels import open_channel
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.wire.rounds import PrefixHash, RoundKey
from specrag_common.wire.sampling import SamplingOptions
from specrag_common.wire.verified import VerifiedTokens
from specrag_orchestrator.answering.inbox import DrafterProposed, new_inbox
from specrag_orchestrator.answering.round_messages import DraftCall, VerifyCall
from specrag_orchestrator.drafters import Drafter
from specrag_orchestrator.drafting import DraftingRequest, DraftStream
from specrag_orchestrator.target import PromptPrefilled, TargetRequest, VerificationStream
from specrag_orchestrator.target_model import TargetModels

from bench.question_sets import load_handbook
from bench.results import (
    BenchResult,
    ResultRow,
    at_most,
    describe_command,
    describe_machine,
    format_rows,
    write_result,
)
from bench.services import ServicePlan, Services, running_services

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Sequence

    from specrag_orchestrator.target import TargetMessage
    from specrag_orchestrator.target_model import TargetModel

NUM_DRAFTERS: Final = 4
NUM_NODES: Final = 32
GAMMA: Final = NUM_NODES // NUM_DRAFTERS
ANYTHING: Final = 1e-6
MAX_TOKENS: Final = 1024
BARS_MS: Final = {"temperature 0": 4.0, "temperature 1, top-p 0.9": 12.0}
BUCKETS_MS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 48)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTime:
    """Milliseconds of one round."""

    drafting: float
    merging: float
    verifying: float
    forward: float

    @property
    def overhead(self) -> float:
        """All but the forward pass."""
        return self.drafting + self.merging + self.verifying - self.forward


class RoundDriver:
    """Drives rounds of a fixed shape, the messages being the orchestrator's own."""

    def __init__(
        self,
        answer_id: str,
        target: VerificationStream,
        streams: Sequence[DraftStream],
        inbox: asyncio.Queue[object],
        vocab_size: int,
    ) -> None:
        self._answer_id = answer_id
        self._target = target
        self._messages: AsyncGenerator[TargetMessage] = target.messages()
        self._streams = streams
        self._inbox = inbox
        self._vocab_size = vocab_size
        self._prefix = PrefixHash()
        self._unsent: tuple[int, ...] = ()
        self._round = 0

    async def wait_prefilled(self) -> None:
        """Return once the prompt is in the target's cache."""
        async for message in self._messages:
            if isinstance(message, PromptPrefilled):
                return

    async def run_round(self) -> tuple[RoundTime, bool]:
        """Return the times of a round, and whether the answer goes on."""
        began = time.perf_counter()
        for index, stream in enumerate(self._streams):
            stream.ask(self._make_call(index))
        proposals = [await self._receive() for _ in self._streams]
        drafted = time.perf_counter()
        filled = [self._fill(proposal) for proposal in proposals]
        prepared = time.perf_counter()  # filling up is the measurement's own work
        tree = merge_proposals(filled, max_draft_tokens=2 * NUM_NODES)
        merged = time.perf_counter()
        assert tree.num_nodes == NUM_NODES, f"{tree.num_nodes} nodes"
        await self._target.verify(VerifyCall(key=self._make_key(0), tree=tree))
        verified = await anext(self._messages)
        ended = time.perf_counter()
        assert isinstance(verified, VerifiedTokens)
        self._prefix.update(verified.token_ids)
        self._unsent = verified.token_ids
        self._round += 1
        times = RoundTime(
            drafting=(drafted - began) * 1e3,
            merging=(merged - prepared) * 1e3,
            verifying=(ended - merged) * 1e3,
            forward=verified.forward_time_us / 1e3,
        )
        return times, verified.end is None

    def _make_call(self, index: int) -> DraftCall:
        return DraftCall(
            key=self._make_key(index),
            committed_token_ids=self._unsent,
            gamma=GAMMA,
            num_branches=1,
            min_probability=ANYTHING,
        )

    def _make_key(self, index: int) -> RoundKey:
        return RoundKey(
            answer_id=self._answer_id,
            round=self._round,
            drafter_index=index,
            committed_length=self._prefix.length,
            prefix_hash=self._prefix.value,
        )

    async def _receive(self) -> DraftProposal:
        said = await self._inbox.get()
        assert isinstance(said, DrafterProposed), f"a drafter was lost: {said}"
        return said.keyed.proposal

    def _fill(self, proposal: DraftProposal) -> DraftProposal:
        """Return the proposal as one branch of ``GAMMA`` tokens that begins like no other's."""
        drafted = proposal.branches[0].token_ids if proposal.branches else ()
        own = (self._round * NUM_DRAFTERS + proposal.drafter_index + 1000) % self._vocab_size
        filling = ((own + step) % self._vocab_size for step in range(1, GAMMA))
        token_ids = (own, *drafted, *filling)[:GAMMA]
        branch = DraftBranch(token_ids=token_ids, laws=(None,) * GAMMA, source=DraftSource.SUFFIX)
        return DraftProposal(
            drafter_index=proposal.drafter_index,
            committed_length=proposal.committed_length,
            branches=(branch,),
            gamma=GAMMA,
        )


@contextlib.asynccontextmanager
async def open_rounds(
    services: Services, answer_id: str, sampling: SamplingOptions
) -> AsyncIterator[RoundDriver]:
    """Open one answer at the verifier and at every drafter."""
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(services.verifier))
        stub: verifier_pb2_grpc.VerifierServiceAsyncStub = verifier_pb2_grpc.VerifierServiceStub(
            channel
        )
        model: TargetModel = await TargetModels(stub).get()
        conversation = _load_conversation()
        request = TargetRequest(
            answer_id=answer_id,
            tenant="",
            conversation=conversation,
            sampling=sampling,
            mode=VerificationMode.REJECTION,
            random_key=bytes(16),
        )
        vocab_size = model.info.vocab_size
        target = await stack.enter_async_context(
            VerificationStream(stub, request, vocab_size=vocab_size)
        )
        inbox = new_inbox()
        streams = []
        for index, address in enumerate(services.drafters):
            drafter_channel = await stack.enter_async_context(open_channel(address))
            drafter = Drafter(index, address, drafter_channel)
            drafting = DraftingRequest(
                answer_id=answer_id,
                drafter_index=index,
                tenant="",
                conversation=conversation,
                sampling=sampling,
                mode=VerificationMode.REJECTION,
                random_key=bytes(range(16)),
                sources=(DraftSource.SUFFIX,),
                tokenizer_fingerprint=model.fingerprint,
            )
            stream = DraftStream(drafter, drafting, inbox, vocab_size=vocab_size)
            task = asyncio.create_task(stream.run())
            stack.callback(task.cancel)
            streams.append(stream)
        yield RoundDriver(answer_id, target, streams, inbox, vocab_size)  # type: ignore[arg-type]


def _load_conversation() -> Conversation:
    question = load_handbook(num_passages=6)[0]
    passages = tuple(
        PromptPassage(number=number, title=passage.title, text=passage.text)
        for number, passage in enumerate(question.passages, 1)
    )
    turn = ConversationTurn(passages=passages, question=question.question)
    return Conversation(turns=(turn,))


async def measure(services: Services, name: str, num_rounds: int) -> list[RoundTime]:
    """Return the times of ``num_rounds`` rounds, warmed up, over as many answers as it takes."""
    temperature = 0.0 if name == "temperature 0" else 1.0
    sampling = SamplingOptions(
        temperature=temperature,
        top_p=1.0 if not temperature else 0.9,
        max_tokens=MAX_TOKENS,
    )
    times: list[RoundTime] = []
    number = 0
    while len(times) < num_rounds:
        number += 1
        async with open_rounds(services, f"{name} {number}", sampling) as driver:
            await driver.wait_prefilled()
            goes_on, warm_up = True, 5
            while goes_on and len(times) < num_rounds:
                one, goes_on = await driver.run_round()
                warm_up -= 1
                if warm_up < 0:
                    times.append(one)
    return times


def describe(name: str, times: Sequence[RoundTime]) -> str:
    """Return a histogram of the overheads and the medians of its parts."""
    overheads = sorted(one.overhead for one in times)
    lines = [f"{name}: {len(times)} rounds of {NUM_NODES} nodes, {NUM_DRAFTERS} drafters"]
    lower = 0.0
    for upper in (*BUCKETS_MS, float("inf")):
        count = sum(lower <= one < upper for one in overheads)
        if count:
            bar = "#" * max(1, round(50 * count / len(overheads)))
            lines.append(f"  {lower:4.0f} to {upper:4.0f} ms {count:4} {bar}")
        lower = float(upper)
    quantiles = statistics.quantiles(overheads, n=20)
    lines.append(
        f"  p50 {statistics.median(overheads):.2f} ms, p95 {quantiles[18]:.2f} ms; medians: "
        f"asking and drafting {_median(times, 'drafting'):.2f}, merging "
        f"{_median(times, 'merging'):.2f}, verifying less forward "
        f"{statistics.median(one.verifying - one.forward for one in times):.2f}, forward "
        f"{_median(times, 'forward'):.1f} ms"
    )
    return "\n".join(lines)


def _median(times: Sequence[RoundTime], part: str) -> float:
    return statistics.median([float(getattr(one, part)) for one in times])


async def run(num_rounds: int, threads: int, model: str) -> list[ResultRow]:
    """Measure both temperatures and return their rows."""
    settings = {"NUM_THREADS": str(threads)}
    plan = ServicePlan(num_drafters=NUM_DRAFTERS, model=model, verifier=settings)
    rows = []
    async with running_services(plan) as services:
        for name, bar_ms in BARS_MS.items():
            times = await measure(services, name, num_rounds)
            print(describe(name, times), flush=True)
            p50 = statistics.median(one.overhead for one in times)
            rows.append(at_most(f"overhead of a round, {name}, p50", p50, bar_ms, "ms"))
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="", help="default: the bundled target")
    parser.add_argument("--quick", action="store_true", help="30 rounds each")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    num_rounds = 30 if arguments.quick else arguments.rounds
    rows = asyncio.run(run(num_rounds, arguments.threads, arguments.model))
    print(format_rows(rows))
    if arguments.out:
        model = arguments.model or "bundled model"
        conditions = f"{model}, {arguments.threads} threads; {describe_machine()}"
        write_result(
            arguments.out,
            BenchResult(
                name="overhead",
                rows=tuple(rows),
                command=describe_command("bench.overhead"),
                conditions=conditions,
            ),
        )


if __name__ == "__main__":
    main()
