"""The target model's side of an answer: one stream to the verifier, whatever the policy."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from specrag.v1 import verifier_pb2
from specrag_common.runtime.client_calls import cancelling
from specrag_common.runtime.errors import (
    InvalidRequest,
    ModelFailure,
    SequenceTooLong,
    SpecragError,
    UpstreamUnavailable,
)
from specrag_common.wire.conversations import encode_conversation
from specrag_common.wire.rounds import encode_round_key
from specrag_common.wire.sampling import encode_mode, encode_sampling
from specrag_common.wire.trees import encode_tree
from specrag_common.wire.verified import VerifiedTokens, decode_verified

from specrag_orchestrator.upstream import RETRY_HINT_S, malformed, peer_errors

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from specrag.v1 import verifier_pb2_grpc
    from specrag_common.conversation import Conversation
    from specrag_common.speculation.proposals import VerificationMode
    from specrag_common.wire.sampling import SamplingOptions

    from specrag_orchestrator.answering.round_messages import VerifyCall

PEER: Final = "verifier"

CLOSE_TIMEOUT_S: Final = 0.05
"""Longest wait for the orderly end of a stream whose answer is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAccepted:
    """The prompt was fitted.

    Attributes:
        num_prompt_tokens: its length.
        kept_passages: numbers of the passages the target reads.
        num_dropped_passages: passages of the last turn left out.
        num_dropped_turns: oldest turns left out.
    """

    num_prompt_tokens: int
    kept_passages: tuple[int, ...]
    num_dropped_passages: int
    num_dropped_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPrefilled:
    """The prompt is in the target's cache.

    Attributes:
        num_cached_tokens: prompt tokens that were there before.
        prefill_s: seconds from admission to the end of the prefill.
    """

    num_cached_tokens: int
    prefill_s: float


TargetMessage = PromptAccepted | PromptPrefilled | VerifiedTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """What the target must know before its first token; see ``OpenVerification``."""

    answer_id: str
    tenant: str
    conversation: Conversation
    sampling: SamplingOptions
    mode: VerificationMode
    random_key: bytes

    def encode(self) -> verifier_pb2.OpenVerification:
        """Return the message."""
        return verifier_pb2.OpenVerification(
            answer_id=self.answer_id,
            tenant=self.tenant,
            prompt=encode_conversation(self.conversation),
            sampling=encode_sampling(self.sampling),
            mode=encode_mode(self.mode),
            random_key=self.random_key,
        )


class TargetStream(Protocol):
    """What the target says about one answer, in order; ends with the tokens that end it."""

    def messages(self) -> AsyncGenerator[TargetMessage]:
        """Yield until the answer has ended; closing the generator early cancels.

        Raises:
            SpecragError: the verifier refused, failed, or ended the stream too early.
        """
        ...


class GenerationStream:
    """A :class:`TargetStream` without rounds: the target decodes alone."""

    def __init__(
        self,
        stub: verifier_pb2_grpc.VerifierServiceAsyncStub,
        request: TargetRequest,
        *,
        vocab_size: int,
    ) -> None:
        """Prepare; the call begins with the first message asked for."""
        self._stub = stub
        self._request = request
        self._vocab_size = vocab_size

    async def messages(self) -> AsyncGenerator[TargetMessage]:
        """See :class:`TargetStream`."""
        request = verifier_pb2.GenerateRequest(open=self._request.encode())
        with _refusals(), peer_errors(PEER), cancelling(self._stub.Generate(request)) as call:
            async for message in _decode_all(call, self._vocab_size):
                yield message
            await _wait_ended(call)


class VerificationStream:
    """A :class:`TargetStream` that verifies a tree a round. Use as ``async with``."""

    def __init__(
        self,
        stub: verifier_pb2_grpc.VerifierServiceAsyncStub,
        request: TargetRequest,
        *,
        vocab_size: int,
    ) -> None:
        """Open the call; it is cancelled on leaving the block."""
        self._call: Any = stub.VerifyTokens()
        self._request = request
        self._vocab_size = vocab_size

    async def __aenter__(self) -> VerificationStream:
        """Send what the target must know first."""
        try:
            with peer_errors(PEER):
                await self._call.write(
                    verifier_pb2.VerifyTokensRequest(open=self._request.encode())
                )
        except BaseException:
            self._call.cancel()
            raise
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Free everything at the verifier: by a half-close behind the end, else by a cancel."""
        try:
            if exc_type is None:
                await self._close()
        finally:
            self._call.cancel()

    async def _close(self) -> None:
        with contextlib.suppress(SpecragError):
            await self._call.done_writing()
        await _wait_ended(self._call)

    async def verify(self, call: VerifyCall) -> None:
        """Send a round; it may be sent before the prefill is done."""
        message = verifier_pb2.VerificationRound(
            key=encode_round_key(call.key),
            tree=encode_tree(call.tree),
            free_run_tokens=call.free_run_tokens,
        )
        with peer_errors(PEER):
            await self._call.write(verifier_pb2.VerifyTokensRequest(round=message))

    async def messages(self) -> AsyncGenerator[TargetMessage]:
        """See :class:`TargetStream`."""
        with _refusals(), peer_errors(PEER):
            async for message in _decode_all(self._call, self._vocab_size):
                yield message


async def _wait_ended(call: Any) -> None:
    """Let the verifier end a stream by itself for a moment: a cancel would look like a fault."""
    with contextlib.suppress(SpecragError, TimeoutError):
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await call.read()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    """Tell what the verifier refuses in the words of our caller's request."""
    try:
        yield
    except SequenceTooLong as exc:
        details = "; ".join(one.description for one in exc.violations) or exc.message
        refusal = InvalidRequest("question", details, reason=exc.reason)
        refusal.metadata = exc.metadata
        raise refusal from exc
    except InvalidRequest as exc:
        raise ModelFailure(f"the verifier refused its request: {exc.message}") from exc


async def _decode_all(call: Any, vocab_size: int) -> AsyncIterator[TargetMessage]:
    """Yield the decoded messages of a call up to the one that ends the answer."""
    async for response in call:
        message = _decode(response, vocab_size)
        yield message
        if isinstance(message, VerifiedTokens) and message.end is not None:
            return
    raise UpstreamUnavailable(
        "the verifier ended the stream before the answer's end", retry_delay_s=RETRY_HINT_S
    )


def _decode(
    response: verifier_pb2.VerifyTokensResponse | verifier_pb2.GenerateResponse, vocab_size: int
) -> TargetMessage:
    kind = response.WhichOneof("message")
    if kind == "prompt_accepted":
        accepted = response.prompt_accepted
        return PromptAccepted(
            num_prompt_tokens=accepted.num_prompt_tokens,
            kept_passages=tuple(accepted.kept_passages),
            num_dropped_passages=accepted.num_dropped_passages,
            num_dropped_turns=accepted.num_dropped_turns,
        )
    if kind == "prompt_prefilled":
        prefilled = response.prompt_prefilled
        return PromptPrefilled(
            num_cached_tokens=prefilled.num_cached_tokens,
            prefill_s=prefilled.prefill_time_us / 1e6,
        )
    if kind != "verified":
        raise malformed(PEER, "no message is set")
    try:
        return decode_verified(response.verified, vocab_size=vocab_size)
    except InvalidRequest as exc:
        raise malformed(PEER, exc.message) from exc
