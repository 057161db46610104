"""The verifier's gRPC surface: messages in, messages out, nothing decided."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from specrag.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specrag_common.runtime.errors import InvalidRequest, UpstreamUnavailable
from specrag_common.wire.verified import encode_verified
from specrag_serving.convert import encode_model_info
from specrag_serving.live_answers import LiveAnswers

from specrag_verifier.convert import (
    decode_order,
    decode_round,
    encode_accepted,
    encode_prefilled,
)
from specrag_verifier.verification import fit_order, open_verification

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import grpc

    from specrag_verifier.verification import AnswerVerification, TargetModel

    Context = grpc.aio.ServicerContext[Any, Any]
    Requests = AsyncIterator[verifier_pb2.VerifyTokensRequest]
    Responses = AsyncGenerator[verifier_pb2.VerifyTokensResponse]

SERVICE: Final = "specrag.v1.VerifierService"

MAX_CHUNK_BYTES: Final = 1024 * 1024
"""Largest piece of the tokenizer sent at once."""

_CAPABILITIES: Final = (common_pb2.CAPABILITY_VERIFY_TOKENS, common_pb2.CAPABILITY_GENERATE)


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves one target model; everything is UNAVAILABLE until :meth:`set_target`."""

    def __init__(self) -> None:
        self._target: TargetModel | None = None
        self._live = LiveAnswers()

    def set_target(self, target: TargetModel) -> None:
        """Begin to serve a loaded model."""
        self._target = target

    async def VerifyTokens(self, request_iterator: Requests, _context: Context) -> Responses:  # noqa: N802 - name given by the contract
        """See the contract."""
        target = self._get_target()
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequest("open", "the first message of the stream must be open")
        order = decode_order(first.open, vocab_size=target.files.tokenizer.vocab_size)
        prompt = await fit_order(target, order)
        with open_verification(target, order, prompt, self._live) as verification:
            yield verifier_pb2.VerifyTokensResponse(prompt_accepted=encode_accepted(prompt))
            async with contextlib.aclosing(
                _serve_rounds(verification, request_iterator, target.files.tokenizer.vocab_size)
            ) as responses:
                async for response in responses:
                    yield response

    async def Generate(  # noqa: N802 - name given by the contract
        self, request: verifier_pb2.GenerateRequest, _context: Context
    ) -> AsyncIterator[verifier_pb2.GenerateResponse]:
        """See the contract."""
        target = self._get_target()
        order = decode_order(request.open, vocab_size=target.files.tokenizer.vocab_size)
        prompt = await fit_order(target, order)
        with open_verification(target, order, prompt, self._live) as verification:
            yield verifier_pb2.GenerateResponse(prompt_accepted=encode_accepted(prompt))
            prefilled = encode_prefilled(await verification.wait_prefilled())
            yield verifier_pb2.GenerateResponse(prompt_prefilled=prefilled)
            async with contextlib.aclosing(verification.generate()) as steps:
                async for verified in steps:
                    yield verifier_pb2.GenerateResponse(verified=encode_verified(verified))

    async def GetTokenizer(  # noqa: N802 - name given by the contract
        self, request: verifier_pb2.GetTokenizerRequest, _context: Context
    ) -> AsyncIterator[verifier_pb2.GetTokenizerResponse]:
        """See the contract."""
        tokenizer = self._get_target().files.tokenizer
        data = b""
        if request.known_fingerprint != tokenizer.fingerprint:
            data = tokenizer.tokenizer_json.encode()
        for start in range(0, max(1, len(data)), MAX_CHUNK_BYTES):
            yield verifier_pb2.GetTokenizerResponse(
                fingerprint=tokenizer.fingerprint, data=data[start : start + MAX_CHUNK_BYTES]
            )

    async def GetModelInfo(  # noqa: N802 - name given by the contract
        self, _request: verifier_pb2.VerifierServiceGetModelInfoRequest, _context: Context
    ) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        """See the contract."""
        target = self._get_target()
        return verifier_pb2.VerifierServiceGetModelInfoResponse(
            model=encode_model_info(
                target.files,
                capabilities=_CAPABILITIES,
                dtype=target.dtype,
                tp_size=target.engine.tp_size,
            )
        )

    def _get_target(self) -> TargetModel:
        if self._target is None:
            raise UpstreamUnavailable(
                "the target model is being loaded", reason="MODEL_LOADING", retry_delay_s=2.0
            )
        return self._target


async def _serve_rounds(
    verification: AnswerVerification, requests: Requests, vocab_size: int
) -> Responses:
    """Prefill, then answer rounds until the answer ends or the caller half-closes."""
    following = asyncio.ensure_future(anext(requests, None))
    prefilling = asyncio.ensure_future(verification.wait_prefilled())
    try:
        await asyncio.wait({following, prefilling}, return_when=asyncio.FIRST_COMPLETED)
        if not prefilling.done() and following.result() is None:
            return  # nobody waits for this prefill any more
        prefilled = encode_prefilled(await prefilling)
        yield verifier_pb2.VerifyTokensResponse(prompt_prefilled=prefilled)
        while (request := await following) is not None:
            if request.WhichOneof("message") != "round":
                raise InvalidRequest("round", "every message behind the first must be a round")
            order = decode_round(request.round, vocab_size=vocab_size)
            async with contextlib.aclosing(verification.verify(order)) as steps:
                async for verified in steps:
                    yield verifier_pb2.VerifyTokensResponse(verified=encode_verified(verified))
            if verification.has_ended:
                return
            following = asyncio.ensure_future(anext(requests, None))
    finally:
        following.cancel()
        prefilling.cancel()
