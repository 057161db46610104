"""Messages of the drafter's contract to domain objects and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import FailedPrecondition, InvalidRequest
from specrag_common.speculation.suffix_drafter import DEFAULT_MIN_PROBABILITY
from specrag_common.wire.arrays import decode_token_ids
from specrag_common.wire.conversations import decode_conversation
from specrag_common.wire.proposals import MAX_BRANCHES_PER_SOURCE, MAX_GAMMA, decode_source
from specrag_common.wire.rounds import (
    RoundKey,
    check_answer_id,
    check_drafter_index,
    decode_round_key,
)
from specrag_common.wire.sampling import check_random_key, decode_mode, decode_sampling
from specrag_serving.convert import check_tenant

if TYPE_CHECKING:
    from specrag.v1 import drafter_pb2
    from specrag_common.conversation import Conversation
    from specrag_common.speculation.proposals import DraftSource, VerificationMode
    from specrag_common.wire.sampling import SamplingOptions
    from specrag_inference.prompts import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingOrder:
    """An answer to draft for.

    Attributes:
        answer_id: the answer.
        drafter_index: this drafter's index in the request.
        tenant: whose prefixes may be shared.
        conversation: what this drafter reads.
        sampling: the target's parameters.
        mode: how the target verifies.
        random_key: 16 bytes.
        sources: which sources propose, none twice; empty: the service's default.
        committed_token_ids: answer tokens already committed.
    """

    answer_id: str
    drafter_index: int
    tenant: str
    conversation: Conversation
    sampling: SamplingOptions
    mode: VerificationMode
    random_key: bytes
    sources: tuple[DraftSource, ...]
    committed_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRoundOrder:
    """What was committed, and how much to propose.

    Attributes:
        key: the round.
        committed_token_ids: tokens committed since the previous round.
        gamma: most tokens a branch.
        num_branches: most branches a source.
        min_probability: a suffix source's tokens are reached with at least this.
    """

    key: RoundKey
    committed_token_ids: tuple[int, ...]
    gamma: int
    num_branches: int
    min_probability: float = DEFAULT_MIN_PROBABILITY


def decode_order(message: drafter_pb2.OpenDrafting, tokenizer: ChatTokenizer) -> DraftingOrder:
    """Return the order of an ``open`` message.

    Raises:
        InvalidRequest: a field is missing, malformed or out of range.
        FailedPrecondition: the target has another tokenizer.
    """
    check_answer_id(message.answer_id, "open.answer_id")
    check_drafter_index(message.drafter_index, "open.drafter_index")
    check_tenant(message.tenant, "open.tenant")
    _check_fingerprint(message.tokenizer_fingerprint, tokenizer)
    committed = decode_token_ids(
        message.committed_token_ids, "open.committed_token_ids", vocab_size=tokenizer.vocab_size
    )
    sources = [
        decode_source(source, f"open.sources[{idx}]") for idx, source in enumerate(message.sources)
    ]
    return DraftingOrder(
        answer_id=message.answer_id,
        drafter_index=message.drafter_index,
        tenant=message.tenant,
        conversation=decode_conversation(message.prompt, "open.prompt"),
        sampling=decode_sampling(
            message.sampling, "open.sampling", vocab_size=tokenizer.vocab_size
        ),
        mode=decode_mode(message.mode, "open.mode"),
        random_key=check_random_key(message.random_key, "open.random_key"),
        sources=tuple(dict.fromkeys(sources)),
        committed_token_ids=tuple(committed.tolist()),
    )


def decode_round(message: drafter_pb2.DraftRound, *, vocab_size: int) -> DraftRoundOrder:
    """Return the order of a ``round`` message.

    Raises:
        InvalidRequest: a field is malformed or out of range.
    """
    if not 0 <= message.gamma <= MAX_GAMMA:
        raise InvalidRequest("round.gamma", f"{message.gamma} is outside 0 to {MAX_GAMMA}")
    if not 1 <= message.num_branches <= MAX_BRANCHES_PER_SOURCE:
        raise InvalidRequest(
            "round.num_branches",
            f"{message.num_branches} is outside 1 to {MAX_BRANCHES_PER_SOURCE}",
        )
    min_probability = DEFAULT_MIN_PROBABILITY
    if message.HasField("min_probability"):
        min_probability = message.min_probability
        if not 0.0 < min_probability <= 1.0:
            raise InvalidRequest("round.min_probability", f"{min_probability} is outside (0, 1]")
    committed = decode_token_ids(
        message.committed_token_ids, "round.committed_token_ids", vocab_size=vocab_size
    )
    return DraftRoundOrder(
        key=decode_round_key(message.key, "round.key"),
        committed_token_ids=tuple(committed.tolist()),
        gamma=message.gamma,
        num_branches=message.num_branches,
        min_probability=min_probability,
    )


def _check_fingerprint(fingerprint: str, tokenizer: ChatTokenizer) -> None:
    if not fingerprint:
        raise InvalidRequest("open.tokenizer_fingerprint", "missing: name the target's tokenizer")
    if fingerprint != tokenizer.fingerprint:
        error = FailedPrecondition(
            f"the target's tokenizer {fingerprint} is not this drafter's {tokenizer.fingerprint}: "
            "their token ids mean different things",
            reason="TOKENIZER_MISMATCH",
        )
        error.metadata = {"target": fingerprint, "drafter": tokenizer.fingerprint}
        raise error
