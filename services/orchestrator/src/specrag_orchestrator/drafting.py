"""One drafter's part in one answer: a ``DraftTokens`` stream, whose end never ends the answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrag.v1 import drafter_pb2
from specrag_common.runtime.client_calls import cancelling
from specrag_common.runtime.errors import InvalidRequest, SpecragError
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span
from specrag_common.wire.arrays import encode_int32
from specrag_common.wire.conversations import encode_conversation
from specrag_common.wire.proposals import decode_proposal, encode_source
from specrag_common.wire.rounds import encode_round_key
from specrag_common.wire.sampling import encode_mode, encode_sampling

from specrag_orchestrator.answering.inbox import DrafterLost, DrafterProposed

if TYPE_CHECKING:
    from specrag_common.conversation import Conversation
    from specrag_common.speculation.proposals import DraftSource, VerificationMode
    from specrag_common.wire.sampling import SamplingOptions

    from specrag_orchestrator.answering.inbox import Inbox
    from specrag_orchestrator.answering.round_messages import DraftCall
    from specrag_orchestrator.drafters import Drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingRequest:
    """What a drafter must know before its first round; see ``OpenDrafting``."""

    answer_id: str
    drafter_index: int
    tenant: str
    conversation: Conversation
    sampling: SamplingOptions
    mode: VerificationMode
    random_key: bytes
    sources: tuple[DraftSource, ...]
    tokenizer_fingerprint: str

    def encode(self) -> drafter_pb2.DraftTokensRequest:
        """Return the first message of the stream."""
        return drafter_pb2.DraftTokensRequest(
            open=drafter_pb2.OpenDrafting(
                answer_id=self.answer_id,
                drafter_index=self.drafter_index,
                tenant=self.tenant,
                prompt=encode_conversation(self.conversation),
                sampling=encode_sampling(self.sampling),
                mode=encode_mode(self.mode),
                random_key=self.random_key,
                sources=[encode_source(source) for source in self.sources],
                tokenizer_fingerprint=self.tokenizer_fingerprint,
            )
        )


class DraftStream:
    """Speaks with one drafter; :meth:`run` it as a task and cancel that to end it."""

    def __init__(
        self, drafter: Drafter, request: DraftingRequest, inbox: Inbox, *, vocab_size: int
    ) -> None:
        """Prepare; nothing is sent before :meth:`run`."""
        self._drafter = drafter
        self._request = request
        self._inbox = inbox
        self._vocab_size = vocab_size
        self._outgoing: asyncio.Queue[DraftCall | None] = asyncio.Queue()
        self._is_finished = False
        self._gamma = 0

    def ask(self, call: DraftCall) -> None:
        """Send a round as soon as the stream takes it; never waits."""
        self._outgoing.put_nowait(call)

    def finish(self) -> None:
        """Half-close: no further round comes, and the drafter may end the stream."""
        self._is_finished = True
        self._outgoing.put_nowait(None)

    async def run(self) -> None:
        """Hand everything the drafter says to the inbox until cancelled or broken.

        The drafter is not called before it is asked for something: one that would be of no use
        under the present load reads no prompt either.
        """
        first = await self._outgoing.get()
        if first is None:
            return
        with span(SpanName.DRAFT, {SpanKey.DRAFTER.value: self._drafter.name}):
            try:
                with cancelling(self._drafter.stub.DraftTokens()) as call:
                    await self._converse(call, first)
                lost = self._lost("STREAM_ENDED", "the drafter ended the stream")
            except InvalidRequest as exc:
                lost = self._lost("INVALID_PROPOSAL", exc.message)
            except SpecragError as exc:
                lost = self._lost(_reason_of(exc), exc.message)
        if not self._is_finished:
            await self._inbox.put(lost)

    async def _converse(self, call: Any, first: DraftCall) -> None:
        await call.write(self._request.encode())
        writer = asyncio.create_task(self._write_rounds(call, first))
        try:
            async for response in call:
                if response.HasField("proposal"):
                    await self._inbox.put(self._decode(response.proposal))
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    async def _write_rounds(self, call: Any, first: DraftCall) -> None:
        """Send rounds as they are asked for; a failure shows at the reading side."""
        asked: DraftCall | None = first
        while asked is not None:
            self._gamma = asked.gamma
            message = drafter_pb2.DraftRound(
                key=encode_round_key(asked.key),
                committed_token_ids=encode_int32(asked.committed_token_ids),
                gamma=asked.gamma,
                num_branches=asked.num_branches,
                min_probability=asked.min_probability,
            )
            await call.write(drafter_pb2.DraftTokensRequest(round=message))
            asked = await self._outgoing.get()
        await call.done_writing()

    def _decode(self, message: drafter_pb2.TokenProposal) -> DrafterProposed:
        """Return a proposal.

        Raises:
            InvalidRequest: it breaks the contract.
        """
        keyed = decode_proposal(message, vocab_size=self._vocab_size, gamma=self._gamma)
        if keyed.key.drafter_index != self._drafter.index:
            raise InvalidRequest("proposal.key.drafter_index", f"{keyed.key.drafter_index}")
        return DrafterProposed(keyed=keyed)

    def _lost(self, reason: str, detail: str) -> DrafterLost:
        return DrafterLost(drafter_index=self._drafter.index, reason=reason, detail=detail)


def _reason_of(error: SpecragError) -> str:
    """Return the reason to name: the plain UNAVAILABLE for a drafter that cannot be reached."""
    return "UNAVAILABLE" if error.status.name == "UNAVAILABLE" else error.reason
