"""What both model services say in the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_inference.messages import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specrag_common.wire.sampling import SamplingOptions

    from specrag_serving.model_files import ModelFiles


MAX_TENANT_CHARS: Final = 128


def check_tenant(tenant: str, field: str) -> None:
    """Raise ``InvalidRequest`` when the name is longer than 128 code points."""
    if len(tenant) > MAX_TENANT_CHARS:
        raise InvalidRequest(field, f"longer than {MAX_TENANT_CHARS} code points")


def to_engine_sampling(options: SamplingOptions, eos_token_ids: Iterable[int]) -> SamplingParams:
    """Return the engine's parameters: what was asked for, and the model's own ends."""
    return SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=options.logit_bias,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=frozenset(eos_token_ids),
        num_top_logprobs=options.num_top_logprobs,
    )


def to_cache_scope(tenant: str) -> bytes:
    """Return what keeps the prefix cache of tenants apart."""
    return b"tenant:" + tenant.encode()


def encode_model_info(
    files: ModelFiles,
    *,
    capabilities: Sequence[common_pb2.Capability.ValueType],
    dtype: str,
    tp_size: int = 1,
) -> common_pb2.ModelInfo:
    """Return the handshake message."""
    return common_pb2.ModelInfo(
        model_id=files.model_id,
        revision=files.revision,
        tokenizer_fingerprint=files.tokenizer.fingerprint,
        max_model_len=files.max_model_len,
        eos_token_ids=files.eos_token_ids,
        tp_size=tp_size,
        capabilities=capabilities,
        vocab_size=files.tokenizer.vocab_size,
        dtype=dtype,
    )
