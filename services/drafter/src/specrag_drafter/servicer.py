"""The drafter's gRPC surface: messages in, messages out, nothing decided."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from opentelemetry import trace
from specrag.v1 import common_pb2, drafter_pb2, drafter_pb2_grpc
from specrag_common.runtime.errors import InvalidRequest, UpstreamUnavailable
from specrag_common.runtime.span_names import SpanKey
from specrag_common.speculation.proposals import DraftSource
from specrag_common.wire.proposals import encode_proposal
from specrag_serving.convert import encode_model_info
from specrag_serving.fitting import fit_prompt
from specrag_serving.live_answers import LiveAnswers

from specrag_drafter.convert import decode_order, decode_round
from specrag_drafter.drafting import (
    AnswerDrafting,
    ModelSource,
    SuffixSource,
    open_model_source,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import grpc
    from specrag_inference.prompts import BuiltPrompt, PromptBuilder
    from specrag_serving.engine_host import EngineHost
    from specrag_serving.model_files import ModelFiles

    from specrag_drafter.convert import DraftingOrder
    from specrag_drafter.drafting import PendingProposal

    Context = grpc.aio.ServicerContext[Any, Any]
    Requests = AsyncIterator[drafter_pb2.DraftTokensRequest]
    Responses = AsyncGenerator[drafter_pb2.DraftTokensResponse]

SERVICE: Final = "specrag.v1.DrafterService"

_MAX_ROUNDS_TAKEN_UP: Final = 16
"""Rounds read ahead of the one being answered; further ones wait on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """What a replica drafts with.

    Attributes:
        files: the model as its folder describes it.
        prompts: makes its prompts.
        default_sources: sources of requests that name none.
        tp_size: ranks of the engine.
    """

    files: ModelFiles
    prompts: PromptBuilder
    default_sources: tuple[DraftSource, ...]
    tp_size: int = 1


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves one draft model: suffix drafting first, the model once its engine is ready."""

    def __init__(self) -> None:
        self._model: DraftModel | None = None
        self._engine: EngineHost | None = None
        self._dtype = ""
        self._live = LiveAnswers()

    def set_model(self, model: DraftModel) -> None:
        """Begin to draft without the model's forward passes."""
        self._model = model

    def set_engine(self, engine: EngineHost, *, dtype: str) -> None:
        """Begin to draft from the model."""
        self._engine = engine
        self._dtype = dtype

    async def DraftTokens(self, request_iterator: Requests, _context: Context) -> Responses:  # noqa: N802 - name given by the contract
        """See the contract."""
        model = self._get_model()
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequest("open", "the first message of the stream must be open")
        order = decode_order(first.open, model.files.tokenizer)
        prompt = await fit_prompt(
            model.prompts,
            order.conversation,
            max_tokens=order.sampling.max_tokens,
            field="open.prompt",
        )
        sources = order.sources or model.default_sources
        claim = self._live.claim(
            (order.answer_id, order.drafter_index),
            f"answer '{order.answer_id}' with drafter_index={order.drafter_index}",
        )
        with claim, contextlib.ExitStack() as stack:
            from_model = self._open_model(order, prompt, sources)
            if from_model is not None:
                stack.callback(from_model.close)
            from_suffix = await _read_suffix(model, order, prompt, sources)
            num_cached_tokens = 0
            if from_model is not None and from_suffix is None:
                num_cached_tokens = (await from_model.wait_read()).num_cached_tokens
            ready = drafter_pb2.DraftingReady(
                num_prompt_tokens=len(prompt.token_ids),
                num_cached_tokens=num_cached_tokens,
                kept_passages=prompt.kept_passages,
            )
            yield drafter_pb2.DraftTokensResponse(ready=ready)
            drafting = AnswerDrafting(order, from_suffix, from_model)
            vocab_size = model.files.tokenizer.vocab_size
            async with contextlib.aclosing(
                _serve_rounds(drafting, request_iterator, vocab_size)
            ) as responses:
                async for response in responses:
                    yield response

    async def GetModelInfo(  # noqa: N802 - name given by the contract
        self, _request: drafter_pb2.DrafterServiceGetModelInfoRequest, _context: Context
    ) -> drafter_pb2.DrafterServiceGetModelInfoResponse:
        """See the contract."""
        model = self._get_model()
        capabilities = [common_pb2.CAPABILITY_DRAFT_SUFFIX]
        if self._engine is not None:
            capabilities.append(common_pb2.CAPABILITY_DRAFT_TOKENS)
        return drafter_pb2.DrafterServiceGetModelInfoResponse(
            model=encode_model_info(
                model.files,
                capabilities=capabilities,
                dtype=self._dtype,
                tp_size=model.tp_size,
            )
        )

    def _get_model(self) -> DraftModel:
        if self._model is None:
            raise UpstreamUnavailable(
                "the drafter is starting", reason="MODEL_LOADING", retry_delay_s=2.0
            )
        return self._model

    def _open_model(
        self, order: DraftingOrder, prompt: BuiltPrompt, sources: tuple[DraftSource, ...]
    ) -> ModelSource | None:
        if DraftSource.MODEL not in sources:
            return None
        if self._engine is None:
            raise UpstreamUnavailable(
                "the draft model is being loaded; suffix drafting is ready",
                reason="MODEL_LOADING",
                retry_delay_s=2.0,
            )
        return open_model_source(self._engine, order, prompt, self._get_model().files.eos_token_ids)


async def _read_suffix(
    model: DraftModel, order: DraftingOrder, prompt: BuiltPrompt, sources: tuple[DraftSource, ...]
) -> SuffixSource | None:
    if DraftSource.SUFFIX not in sources:
        return None
    token_ids = (*prompt.token_ids, *order.committed_token_ids)
    return await SuffixSource.read(token_ids, model.files.eos_token_ids)


async def _serve_rounds(drafting: AnswerDrafting, requests: Requests, vocab_size: int) -> Responses:
    """Answer every round once, in order, taking later ones up while earlier ones are drawn."""
    taken_up: asyncio.Queue[PendingProposal] = asyncio.Queue(_MAX_ROUNDS_TAKEN_UP)
    reading = asyncio.create_task(_take_up_rounds(drafting, requests, taken_up, vocab_size))
    try:
        while (pending := await _next_taken_up(taken_up, reading)) is not None:
            keyed = await drafting.complete(pending)
            proposal = encode_proposal(keyed.key, keyed.proposal, draft_time_us=keyed.draft_time_us)
            yield drafter_pb2.DraftTokensResponse(proposal=proposal)
    finally:
        reading.cancel()
        trace.get_current_span().set_attributes(
            {
                SpanKey.NUM_DRAFT_TOKENS: drafting.num_draft_tokens,
                SpanKey.NUM_ROUNDS: drafting.num_rounds,
                SpanKey.NUM_STALE_ROUNDS: drafting.num_stale,
            }
        )


async def _take_up_rounds(
    drafting: AnswerDrafting,
    requests: Requests,
    taken_up: asyncio.Queue[PendingProposal],
    vocab_size: int,
) -> None:
    """Read rounds until the caller half-closes or one is bad."""
    async for request in requests:
        if request.WhichOneof("message") != "round":
            raise InvalidRequest("round", "every message behind the first must be a round")
        order = decode_round(request.round, vocab_size=vocab_size)
        await taken_up.put(drafting.take_up(order))


async def _next_taken_up(
    taken_up: asyncio.Queue[PendingProposal], reading: asyncio.Task[None]
) -> PendingProposal | None:
    """Return the oldest round taken up; when reading has ended, ``None`` or what went wrong."""
    if not taken_up.empty():
        return taken_up.get_nowait()
    getting = asyncio.ensure_future(taken_up.get())
    try:
        await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
        if getting.done():
            return getting.result()
        await reading
        return None
    finally:
        getting.cancel()
