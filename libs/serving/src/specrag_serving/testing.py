"""Tiny model folders and hand-driven streams, for tests of the model services."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors.torch import load_file, save_file
from specrag.v1 import drafter_pb2, verifier_pb2
from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.lifecycle import Lifecycle
from specrag_common.speculation.proposals import DraftSource, VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_common.wire.arrays import encode_int32
from specrag_common.wire.conversations import encode_conversation
from specrag_common.wire.proposals import decode_proposal, encode_source
from specrag_common.wire.rounds import PrefixHash, RoundKey, encode_round_key
from specrag_common.wire.sampling import SamplingOptions, encode_mode, encode_sampling
from specrag_common.wire.trees import encode_tree
from specrag_common.wire.verified import VerifiedTokens, decode_verified
from specrag_inference.testing import BYTE_VOCAB_SIZE, save_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from specrag.v1 import drafter_pb2_grpc, verifier_pb2_grpc
    from specrag_common.runtime.client_calls import ServiceChannel
    from specrag_common.speculation.proposals import DraftProposal

_HEAD = "lm_head.weight"


def save_sharp_model(
    folder: Path, *, seed: int = 0, sharpness: float = 1.0, noise: float = 0.0, noise_seed: int = 0
) -> Path:
    """Write a tiny random model whose output layer is scaled, then disturbed.

    Models of one seed and different noise speak alike: that makes a target and its drafters.

    Args:
        folder: becomes a model reference.
        seed: of the weights.
        sharpness: factor of the output layer; larger ones concentrate the law.
        noise: standard deviation of the disturbance, in that of the output layer.
        noise_seed: of the disturbance.
    """
    save_tiny_model(folder, seed=seed)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors[_HEAD]
    generator = torch.Generator().manual_seed(noise_seed)
    disturbance = torch.randn(head.shape, generator=generator) * head.std() * noise
    tensors[_HEAD] = (head + disturbance) * sharpness
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A service under test, with a channel to it."""

    service: Any
    channel: ServiceChannel


@contextlib.asynccontextmanager
async def running(start: Callable[[Lifecycle], Awaitable[Any]]) -> AsyncIterator[Started]:
    """Start a service in this loop, on port 0, and stop it afterwards."""
    lifecycle = Lifecycle()
    try:
        service = await start(lifecycle)
        async with open_channel(f"127.0.0.1:{service.server.port}") as channel:
            yield Started(service=service, channel=channel)
    finally:
        await lifecycle.close()


async def wait_freed(started: Started, timeout_s: float = 3.0) -> None:
    """Return once no rpc runs and every block of the engine is free; fail after ``timeout_s``."""
    async with asyncio.timeout(timeout_s):
        while True:
            stats = await started.service.engine.stats()
            is_idle = not (stats.num_running or stats.num_waiting)
            is_free = stats.num_free_blocks == stats.num_blocks
            if started.service.server.num_in_flight == 0 and is_idle and is_free:
                return
            await asyncio.sleep(0.01)


def build_conversation(*texts: str, question: str = "Who?", first_number: int = 1) -> Conversation:
    """Return one turn with a passage for each text."""
    passages = tuple(
        PromptPassage(number=number, title="T", text=text)
        for number, text in enumerate(texts, first_number)
    )
    return Conversation(turns=(ConversationTurn(passages=passages, question=question),))


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSetup:
    """One answer as every service is told of it."""

    answer_id: str
    conversation: Conversation = field(default_factory=lambda: build_conversation("some passage"))
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=16))
    mode: VerificationMode = VerificationMode.REJECTION
    random_key: bytes = bytes(16)
    tenant: str = "t"

    def open_verification(self) -> verifier_pb2.OpenVerification:
        """Return the message for the verifier."""
        return verifier_pb2.OpenVerification(
            answer_id=self.answer_id,
            tenant=self.tenant,
            prompt=encode_conversation(self.conversation),
            sampling=encode_sampling(self.sampling),
            mode=encode_mode(self.mode),
            random_key=self.random_key,
        )

    def open_drafting(
        self,
        fingerprint: str,
        *,
        drafter_index: int = 0,
        sources: Sequence[DraftSource] = (),
        conversation: Conversation | None = None,
    ) -> drafter_pb2.OpenDrafting:
        """Return the message for a drafter, which may read a conversation of its own."""
        return drafter_pb2.OpenDrafting(
            answer_id=self.answer_id,
            drafter_index=drafter_index,
            tenant=self.tenant,
            prompt=encode_conversation(conversation or self.conversation),
            sampling=encode_sampling(self.sampling),
            mode=encode_mode(self.mode),
            random_key=self.random_key,
            sources=[encode_source(source) for source in sources],
            tokenizer_fingerprint=fingerprint,
        )


class HandVerifier:
    """A ``VerifyTokens`` stream driven round by round. Use as ``async with``."""

    def __init__(
        self, stub: verifier_pb2_grpc.VerifierServiceAsyncStub, setup: AnswerSetup
    ) -> None:
        """Prepare a stream."""
        self.call: Any = stub.VerifyTokens()
        self.token_ids: list[int] = []
        self.end: str | None = None
        self._setup = setup
        self._round = 0

    async def __aenter__(self) -> Self:
        await self.call.write(
            verifier_pb2.VerifyTokensRequest(open=self._setup.open_verification())
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.call.cancel()

    async def wait_prefilled(self) -> verifier_pb2.PromptAccepted:
        """Return what was accepted once the prompt is in the cache."""
        accepted: verifier_pb2.PromptAccepted = (await self.call.read()).prompt_accepted
        assert (await self.call.read()).WhichOneof("message") == "prompt_prefilled"
        return accepted

    def next_key(self) -> RoundKey:
        """Return the key of the next round."""
        return RoundKey(
            answer_id=self._setup.answer_id,
            round=self._round,
            drafter_index=0,
            committed_length=len(self.token_ids),
            prefix_hash=PrefixHash(self.token_ids).value,
        )

    async def verify(
        self, tree: TokenTree | None = None, *, free_run_tokens: int = 0
    ) -> list[VerifiedTokens]:
        """Run one round and return its messages."""
        await self.send(tree, free_run_tokens=free_run_tokens)
        return await self.receive()

    async def send(self, tree: TokenTree | None = None, *, free_run_tokens: int = 0) -> None:
        """Send one round."""
        message = verifier_pb2.VerificationRound(
            key=encode_round_key(self.next_key()),
            tree=encode_tree(tree or TokenTree.empty()),
            free_run_tokens=free_run_tokens,
        )
        self._round += 1
        await self.call.write(verifier_pb2.VerifyTokensRequest(round=message))

    async def receive(self) -> list[VerifiedTokens]:
        """Return the messages of the round sent last."""
        messages: list[VerifiedTokens] = []
        while not messages or not messages[-1].is_last_of_round:
            response = await self.call.read()
            messages.append(decode_verified(response.verified, vocab_size=BYTE_VOCAB_SIZE))
            self.token_ids += messages[-1].token_ids
            self.end = messages[-1].end
        return messages


class HandDrafter:
    """A ``DraftTokens`` stream driven round by round. Use as ``async with``."""

    def __init__(
        self, stub: drafter_pb2_grpc.DrafterServiceAsyncStub, message: drafter_pb2.OpenDrafting
    ) -> None:
        """Prepare a stream."""
        self.call: Any = stub.DraftTokens()
        self._open = message
        self._prefix = PrefixHash()
        self._round = 0

    async def __aenter__(self) -> Self:
        await self.call.write(drafter_pb2.DraftTokensRequest(open=self._open))
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.call.cancel()

    async def wait_ready(self) -> drafter_pb2.DraftingReady:
        """Return the drafter's first message."""
        ready: drafter_pb2.DraftingReady = (await self.call.read()).ready
        return ready

    async def draft(
        self, committed: Sequence[int] = (), *, gamma: int, **options: float
    ) -> DraftProposal:
        """Commit tokens and return the next proposal; ``options`` are fields of the round."""
        await self.send(committed, gamma=gamma, **options)
        return await self.receive(gamma=gamma)

    async def send(self, committed: Sequence[int] = (), *, gamma: int, **options: float) -> None:
        """Send one round; ``options`` are further fields of it."""
        self._prefix.update(committed)
        key = RoundKey(
            answer_id=self._open.answer_id,
            round=self._round,
            drafter_index=self._open.drafter_index,
            committed_length=self._prefix.length,
            prefix_hash=self._prefix.value,
        )
        self._round += 1
        message = drafter_pb2.DraftRound(
            key=encode_round_key(key),
            committed_token_ids=encode_int32(committed),
            gamma=gamma,
            **{"num_branches": 1, **options},  # type: ignore[arg-type]  # numbers, by field name
        )
        await self.call.write(drafter_pb2.DraftTokensRequest(round=message))

    async def receive(self, *, gamma: int) -> DraftProposal:
        """Return the next proposal."""
        response = await self.call.read()
        keyed = decode_proposal(response.proposal, vocab_size=BYTE_VOCAB_SIZE, gamma=gamma)
        return keyed.proposal
