"""What the verifier serves: its handshake and its tokenizer, fetched once a fingerprint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2, verifier_pb2
from specrag_common.runtime.errors import FailedPrecondition
from tokenizers import Tokenizer

from specrag_orchestrator.target import PEER
from specrag_orchestrator.upstream import malformed, peer_errors

if TYPE_CHECKING:
    from specrag.v1 import verifier_pb2_grpc

HANDSHAKE_TIMEOUT_S: Final = 5.0
TOKENIZER_TIMEOUT_S: Final = 30.0
_MAX_TOKENIZERS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """The target as this service needs it.

    Attributes:
        info: its handshake.
        tokenizer: its tokenizer; only read.
    """

    info: common_pb2.ModelInfo
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.info.tokenizer_fingerprint

    def require(self, capability: common_pb2.Capability.ValueType) -> None:
        """Raise unless the verifier can do it.

        Raises:
            FailedPrecondition: it cannot.
        """
        if capability not in self.info.capabilities:
            name = common_pb2.Capability.Name(capability)
            raise FailedPrecondition(
                f"the verifier ({self.info.model_id}) does not offer {name}",
                reason="MISSING_CAPABILITY",
            )


class TargetModels:
    """Asks the verifier what it serves; tokenizers are kept by fingerprint."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceAsyncStub) -> None:
        """Ask through ``stub``."""
        self._stub = stub
        self._tokenizers: dict[str, Tokenizer] = {}
        self._loading = asyncio.Lock()

    async def get(self) -> TargetModel:
        """Return what is served now: one short call, and the tokenizer if it is an unknown one.

        Raises:
            UpstreamUnavailable: the verifier does not answer.
        """
        with peer_errors(PEER):
            request = verifier_pb2.VerifierServiceGetModelInfoRequest()
            response = await self._stub.GetModelInfo(request, timeout=HANDSHAKE_TIMEOUT_S)
        info = response.model
        tokenizer = self._tokenizers.get(info.tokenizer_fingerprint)
        if tokenizer is None:
            async with self._loading:
                tokenizer = await self._load(info.tokenizer_fingerprint)
        return TargetModel(info=info, tokenizer=tokenizer)

    async def _load(self, fingerprint: str) -> Tokenizer:
        """Fetch a tokenizer, unless another request has done so meanwhile."""
        known = self._tokenizers.get(fingerprint)
        if known is not None:
            return known
        data = bytearray()
        with peer_errors(PEER):
            request = verifier_pb2.GetTokenizerRequest()
            async for chunk in self._stub.GetTokenizer(request, timeout=TOKENIZER_TIMEOUT_S):
                if chunk.fingerprint != fingerprint:
                    raise malformed(PEER, "the tokenizer's fingerprint is not the handshake's")
                data += chunk.data
        tokenizer = await asyncio.to_thread(_parse, bytes(data))
        while len(self._tokenizers) >= _MAX_TOKENIZERS:
            del self._tokenizers[next(iter(self._tokenizers))]
        self._tokenizers[fingerprint] = tokenizer
        return tokenizer


def _parse(data: bytes) -> Tokenizer:
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(data.decode())
    except Exception as exc:  # the library raises plain Exception
        raise malformed(PEER, f"tokenizer.json of {len(data)} bytes cannot be read: {exc}") from exc
    return tokenizer
