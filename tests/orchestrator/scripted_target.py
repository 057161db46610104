"""Model services that follow a script, over real gRPC: a target and drafters without a model.

The target's next token at answer position t is ``script[t]``, whatever it read. It speaks the whole
protocol: fitting, prefill, trees, free runs, stop strings, limits. Drafters propose the script with
wrong tokens where they are told to. One token a byte, so that every character beyond ASCII takes
several tokens and a rejection can fall inside it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from specrag.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from specrag_common.runtime.errors import FailedPrecondition, SpecragError
from specrag_common.speculation.proposals import DraftBranch, DraftProposal, DraftSource
from specrag_common.speculation.token_tree import ROOT, TokenTree
from specrag_common.text.detokenizer import IncrementalDetokenizer
from specrag_common.text.stops import StopMatcher
from specrag_common.wire.proposals import encode_proposal
from specrag_common.wire.rounds import PrefixHash, RoundKey, decode_round_key
from specrag_common.wire.sampling import SamplingOptions, decode_sampling
from specrag_common.wire.trees import decode_tree
from specrag_common.wire.verified import AnswerEnd, VerifiedTokens, encode_verified

from tests.orchestrator.byte_tokenizer import END_ID, FINGERPRINT, TOKENIZER, VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

Context = grpc.aio.ServicerContext[Any, Any]
VERIFIER = "specrag.v1.VerifierService"
DRAFTER = "specrag.v1.DrafterService"


def script_of(text: str) -> list[int]:
    """Return the ids of ``text`` and the one that ends the answer."""
    return [*text.encode(), END_ID]


@dataclass(slots=True)
class TargetScript:
    """What the scripted target does; tests may change it at any time.

    Attributes:
        token_ids: the answer.
        prefill_s: time the prompt takes.
        step_s: time each pass takes.
        max_passages: passages of the last turn that fit.
        max_turns: past turns that fit.
        error_at_round: raise ``error`` instead of verifying this round.
        error: what to raise.
    """

    token_ids: list[int]
    prefill_s: float = 0.0
    step_s: float = 0.0
    max_passages: int = 1000
    max_turns: int = 1000
    error_at_round: int | None = None
    error: SpecragError | None = None


@dataclass(slots=True)
class _Progress:
    """One answer at the target: what is committed, and whether it has ended."""

    script: list[int]
    sampling: SamplingOptions
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: AnswerEnd | None = None
    stop_text_length: int | None = None
    detokenizer: IncrementalDetokenizer = field(
        default_factory=lambda: IncrementalDetokenizer(TOKENIZER)
    )

    def commit_next(self) -> int:
        """Commit the script's next token and judge whether the answer ends with it."""
        token_id = self.script[min(len(self.token_ids), len(self.script) - 1)]
        self.token_ids.append(token_id)
        self.text += self.detokenizer.push([token_id])
        match = StopMatcher(self.sampling.stop).find(self.text)
        if match is not None:
            self.end, self.stop_text_length = AnswerEnd.STOP, match.start
        elif token_id == END_ID:
            self.end = AnswerEnd.STOP
        elif len(self.token_ids) >= self.sampling.max_tokens:
            self.end = AnswerEnd.LENGTH
        return token_id


class ScriptedVerifier(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves :class:`TargetScript`; remembers what it was asked."""

    def __init__(self, script: TargetScript, *, fingerprint: str = FINGERPRINT) -> None:
        self.script = script
        self.fingerprint = fingerprint
        self.opened: list[verifier_pb2.OpenVerification] = []
        self.trees: list[TokenTree] = []
        self.num_open = 0
        self.num_tokenizer_calls = 0

    async def GetModelInfo(  # noqa: N802 - name given by the protocol
        self, request: Any, context: Context
    ) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        return verifier_pb2.VerifierServiceGetModelInfoResponse(
            model=model_info(
                self.fingerprint,
                common_pb2.CAPABILITY_VERIFY_TOKENS,
                common_pb2.CAPABILITY_GENERATE,
            )
        )

    async def GetTokenizer(  # noqa: N802 - name given by the protocol
        self, request: verifier_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.GetTokenizerResponse]:
        self.num_tokenizer_calls += 1
        data = TOKENIZER.to_str().encode()
        for begin in range(0, len(data), 1000):
            yield verifier_pb2.GetTokenizerResponse(
                fingerprint=self.fingerprint, data=data[begin : begin + 1000]
            )

    async def Generate(  # noqa: N802 - name given by the protocol
        self, request: verifier_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[verifier_pb2.GenerateResponse]:
        self.num_open += 1
        try:
            async for accepted, prefilled in self._read(request.open):
                yield verifier_pb2.GenerateResponse(
                    prompt_accepted=accepted, prompt_prefilled=prefilled
                )
            progress = self._begin(request.open)
            key = RoundKey(
                answer_id=request.open.answer_id,
                round=0,
                drafter_index=0,
                committed_length=0,
                prefix_hash=0,
            )
            while progress.end is None:
                verified = await self._step(progress, key, TokenTree.empty(), is_last=False)
                yield verifier_pb2.GenerateResponse(verified=encode_verified(verified))
        finally:
            self.num_open -= 1

    async def VerifyTokens(  # noqa: N802 - name given by the protocol
        self, request_iterator: AsyncIterator[verifier_pb2.VerifyTokensRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.VerifyTokensResponse]:
        self.num_open += 1
        try:
            first = await anext(request_iterator)
            async for accepted, prefilled in self._read(first.open):
                yield verifier_pb2.VerifyTokensResponse(
                    prompt_accepted=accepted, prompt_prefilled=prefilled
                )
            progress = self._begin(first.open)
            async for request in request_iterator:
                async for verified in self._verify(progress, request.round):
                    yield verifier_pb2.VerifyTokensResponse(verified=encode_verified(verified))
        finally:
            self.num_open -= 1

    def _begin(self, message: verifier_pb2.OpenVerification) -> _Progress:
        return _Progress(script=self.script.token_ids, sampling=decode_sampling(message.sampling))

    async def _read(
        self, message: verifier_pb2.OpenVerification
    ) -> AsyncIterator[
        tuple[verifier_pb2.PromptAccepted | None, verifier_pb2.PromptPrefilled | None]
    ]:
        """Fit the prompt and read it."""
        self.opened.append(message)
        turns = list(message.prompt.turns)
        num_dropped_turns = max(0, len(turns) - 1 - self.script.max_turns)
        past, last = turns[num_dropped_turns:-1], turns[-1]
        kept = [one.number for turn in past for one in turn.passages]
        kept += [one.number for one in last.passages[: self.script.max_passages]]
        yield (
            verifier_pb2.PromptAccepted(
                num_prompt_tokens=100,
                kept_passages=kept,
                num_dropped_passages=max(0, len(last.passages) - self.script.max_passages),
                num_dropped_turns=num_dropped_turns,
            ),
            None,
        )
        await asyncio.sleep(self.script.prefill_s)
        yield None, verifier_pb2.PromptPrefilled(num_cached_tokens=7, prefill_time_us=1000)

    async def _verify(
        self, progress: _Progress, message: verifier_pb2.VerificationRound
    ) -> AsyncIterator[VerifiedTokens]:
        key = decode_round_key(message.key)
        assert key.committed_length == len(progress.token_ids)
        assert key.prefix_hash == PrefixHash(progress.token_ids).value
        if self.script.error_at_round == key.round and self.script.error is not None:
            raise self.script.error
        tree = decode_tree(message.tree, vocab_size=VOCAB_SIZE)
        self.trees.append(tree)
        left = message.free_run_tokens
        verified = await self._step(progress, key, tree, is_last=not left)
        yield verified
        while left and verified.end is None:
            left -= 1
            verified = await self._step(progress, key, TokenTree.empty(), is_last=not left)
            yield verified

    async def _step(
        self, progress: _Progress, key: RoundKey, tree: TokenTree, *, is_last: bool
    ) -> VerifiedTokens:
        """Walk the tree along the script; the final token is a bonus at a leaf."""
        await asyncio.sleep(self.script.step_s)
        begin = len(progress.token_ids)
        accepted: list[int] = []
        node_idx, is_final_drawn = ROOT, False
        while progress.end is None and not is_final_drawn:
            token_id = progress.commit_next()
            child = find_child(tree, node_idx, token_id)
            if child is None:
                is_final_drawn = True
            else:
                accepted.append(child)
                node_idx = child
        is_leaf = not (tree.parent_idx == node_idx).any()
        token_ids = tuple(progress.token_ids[begin:])
        return VerifiedTokens(
            key=key,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
            accepted_node_idx=tuple(accepted),
            has_bonus=is_final_drawn and is_leaf,
            end=progress.end,
            stop_text_length=progress.stop_text_length,
            forward_time_us=30_000,  # as it is told: a target for which drafting pays
            is_last_of_round=is_last,
        )


@dataclass(slots=True)
class DraftScript:
    """What a scripted drafter does; tests may change it at any time.

    Attributes:
        token_ids: what it believes the answer is.
        wrong_every: propose a wrong token at every so many positions; 0: never.
        delay_s: time a proposal takes.
        prefill_s: time its prompt takes.
        error_at_round: raise ``error`` instead of this round's proposal.
        error: what to raise.
        hang_at_round: never answer this round.
        on_round: called with each round's number.
        fingerprint: of its tokenizer.
    """

    token_ids: list[int]
    wrong_every: int = 0
    delay_s: float = 0.0
    prefill_s: float = 0.0
    error_at_round: int | None = None
    error: SpecragError | None = None
    hang_at_round: int | None = None
    on_round: Callable[[int], None] = lambda _: None
    fingerprint: str = FINGERPRINT


class ScriptedDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves :class:`DraftScript`; remembers what it was asked."""

    def __init__(self, script: DraftScript) -> None:
        self.script = script
        self.opened: list[drafter_pb2.OpenDrafting] = []
        self.committed: list[list[int]] = []
        self.num_open = 0

    async def GetModelInfo(  # noqa: N802 - name given by the protocol
        self, request: Any, context: Context
    ) -> drafter_pb2.DrafterServiceGetModelInfoResponse:
        return drafter_pb2.DrafterServiceGetModelInfoResponse(
            model=model_info(self.script.fingerprint, common_pb2.CAPABILITY_DRAFT_SUFFIX)
        )

    async def DraftTokens(  # noqa: N802 - name given by the protocol
        self, request_iterator: AsyncIterator[drafter_pb2.DraftTokensRequest], context: Context
    ) -> AsyncIterator[drafter_pb2.DraftTokensResponse]:
        self.num_open += 1
        try:
            first = await anext(request_iterator)
            self.opened.append(first.open)
            if first.open.tokenizer_fingerprint != self.script.fingerprint:
                raise FailedPrecondition("another tokenizer", reason="TOKENIZER_MISMATCH")
            await asyncio.sleep(self.script.prefill_s)
            yield drafter_pb2.DraftTokensResponse(ready=drafter_pb2.DraftingReady())
            committed: list[int] = []
            self.committed.append(committed)
            async for request in request_iterator:
                yield await self._propose(request.round, committed)
        finally:
            self.num_open -= 1

    async def _propose(
        self, message: drafter_pb2.DraftRound, committed: list[int]
    ) -> drafter_pb2.DraftTokensResponse:
        key = decode_round_key(message.key)
        committed.extend(decode_ids(message.committed_token_ids))
        assert key.committed_length == len(committed)
        assert key.prefix_hash == PrefixHash(committed).value
        self.script.on_round(key.round)
        if self.script.error_at_round == key.round and self.script.error is not None:
            raise self.script.error
        await asyncio.sleep(3600 if self.script.hang_at_round == key.round else self.script.delay_s)
        branches = [
            DraftBranch(token_ids=ids, laws=(None,) * len(ids), source=DraftSource.SUFFIX)
            for ids in self._draft(len(committed), message.gamma)
        ]
        proposal = DraftProposal(
            drafter_index=key.drafter_index,
            committed_length=key.committed_length,
            branches=tuple(branches),
        )
        return drafter_pb2.DraftTokensResponse(
            proposal=encode_proposal(key, proposal, draft_time_us=100)
        )

    def _draft(self, position: int, gamma: int) -> Iterator[tuple[int, ...]]:
        """Yield one branch: the script from ``position`` on, wrong where it shall be."""
        token_ids = list(self.script.token_ids[position : position + gamma])
        for idx in range(len(token_ids)):
            if self.script.wrong_every and (position + idx + 1) % self.script.wrong_every == 0:
                token_ids[idx] = (token_ids[idx] + 1) % 256
        if token_ids:
            yield tuple(token_ids)


def find_child(tree: TokenTree, parent: int, token_id: int) -> int | None:
    """Return the child of ``parent`` with this token."""
    for node_idx in range(tree.num_nodes):
        if tree.parent_idx[node_idx] == parent and tree.token_ids[node_idx] == token_id:
            return node_idx
    return None


def decode_ids(data: bytes) -> list[int]:
    """Return int32 ids."""
    return [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]


def model_info(
    fingerprint: str, *capabilities: common_pb2.Capability.ValueType
) -> common_pb2.ModelInfo:
    """Return the handshake of a scripted model."""
    return common_pb2.ModelInfo(
        model_id="scripted",
        revision="1",
        tokenizer_fingerprint=fingerprint,
        max_model_len=4096,
        eos_token_ids=[END_ID],
        tp_size=1,
        capabilities=capabilities,
        vocab_size=VOCAB_SIZE,
        dtype="none",
    )
