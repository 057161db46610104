"""Messages of the verifier's contract to domain objects and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag.v1 import verifier_pb2
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.wire.arrays import decode_token_ids
from specrag_common.wire.conversations import decode_conversation
from specrag_common.wire.rounds import RoundKey, check_answer_id, decode_round_key
from specrag_common.wire.sampling import check_random_key, decode_mode, decode_sampling
from specrag_common.wire.trees import decode_tree
from specrag_common.wire.verified import AnswerEnd, TopTokens, VerifiedTokens
from specrag_inference.messages import FinishReason
from specrag_serving.convert import check_tenant

if TYPE_CHECKING:
    from specrag_common.conversation import Conversation
    from specrag_common.speculation.proposals import VerificationMode
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.sampling import SamplingOptions
    from specrag_inference.messages import RoundVerified, SequenceOpened
    from specrag_inference.prompts import BuiltPrompt

MAX_FREE_RUN_TOKENS: Final = 4096

_ENDS: Final = {
    FinishReason.STOP_TOKEN: AnswerEnd.STOP,
    FinishReason.STOP_STRING: AnswerEnd.STOP,
    FinishReason.LENGTH: AnswerEnd.LENGTH,
    FinishReason.CONTEXT: AnswerEnd.CONTEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOrder:
    """An answer to verify or to generate.

    Attributes:
        answer_id: unique among live answers.
        tenant: whose prefixes may be shared.
        conversation: what the target reads.
        sampling: the output law and the ends.
        mode: how the target decides.
        random_key: 16 bytes.
        committed_token_ids: answer tokens already committed.
    """

    answer_id: str
    tenant: str
    conversation: Conversation
    sampling: SamplingOptions
    mode: VerificationMode
    random_key: bytes
    committed_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOrder:
    """One tree to verify, and how many tokens to decode alone after it."""

    key: RoundKey
    tree: TokenTree
    free_run_tokens: int


def decode_order(message: verifier_pb2.OpenVerification, *, vocab_size: int) -> AnswerOrder:
    """Return the order of an ``open`` message.

    Raises:
        InvalidRequest: a field is missing, malformed or out of range.
    """
    check_answer_id(message.answer_id, "open.answer_id")
    check_tenant(message.tenant, "open.tenant")
    sampling = decode_sampling(message.sampling, "open.sampling", vocab_size=vocab_size)
    committed = decode_token_ids(
        message.committed_token_ids, "open.committed_token_ids", vocab_size=vocab_size
    )
    if len(committed) >= sampling.max_tokens:
        raise InvalidRequest(
            "open.committed_token_ids",
            f"{len(committed)} tokens leave none of max_tokens={sampling.max_tokens}",
        )
    return AnswerOrder(
        answer_id=message.answer_id,
        tenant=message.tenant,
        conversation=decode_conversation(message.prompt, "open.prompt"),
        sampling=sampling,
        mode=decode_mode(message.mode, "open.mode"),
        random_key=check_random_key(message.random_key, "open.random_key"),
        committed_token_ids=tuple(committed.tolist()),
    )


def decode_round(message: verifier_pb2.VerificationRound, *, vocab_size: int) -> RoundOrder:
    """Return the order of a ``round`` message.

    Raises:
        InvalidRequest: a field is malformed or out of range.
    """
    if not 0 <= message.free_run_tokens <= MAX_FREE_RUN_TOKENS:
        raise InvalidRequest(
            "round.free_run_tokens",
            f"{message.free_run_tokens} is outside 0 to {MAX_FREE_RUN_TOKENS}",
        )
    return RoundOrder(
        key=decode_round_key(message.key, "round.key"),
        tree=decode_tree(message.tree, vocab_size=vocab_size, field="round.tree"),
        free_run_tokens=message.free_run_tokens,
    )


def encode_accepted(prompt: BuiltPrompt) -> verifier_pb2.PromptAccepted:
    """Return the message that says what the target reads."""
    return verifier_pb2.PromptAccepted(
        num_prompt_tokens=len(prompt.token_ids),
        kept_passages=prompt.kept_passages,
        num_dropped_passages=prompt.num_dropped_passages,
        num_dropped_turns=prompt.num_dropped_turns,
    )


def encode_prefilled(event: SequenceOpened) -> verifier_pb2.PromptPrefilled:
    """Return the message that says that the prompt is in the cache."""
    return verifier_pb2.PromptPrefilled(
        num_cached_tokens=event.num_cached_tokens,
        prefill_time_us=round(event.prefill_s * 1e6),
    )


def to_verified(key: RoundKey, event: RoundVerified) -> VerifiedTokens:
    """Return what one target pass committed, under the key of its round."""
    return VerifiedTokens(
        key=key,
        token_ids=tuple(token.token_id for token in event.tokens),
        logprobs=tuple(token.logprob for token in event.tokens),
        accepted_node_idx=tuple(
            token.node_idx for token in event.tokens if token.node_idx is not None
        ),
        has_bonus=bool(event.tokens) and event.tokens[-1].is_bonus,
        end=None if event.finish_reason is None else _ENDS[event.finish_reason],
        stop_text_length=event.stop_text_length,
        forward_time_us=round(event.forward_s * 1e6),
        is_last_of_round=event.last,
        num_pass_tokens=event.load.num_tokens,
        num_pass_sequences=event.load.num_sequences,
        top_tokens=_to_top_tokens(event),
    )


def _to_top_tokens(event: RoundVerified) -> tuple[TopTokens, ...]:
    """Return the likeliest tokens in place of each one; nothing when nobody asked for them."""
    if not any(token.top_logprobs for token in event.tokens):
        return ()
    return tuple(
        TopTokens(
            token_ids=tuple(one.token_id for one in token.top_logprobs),
            logprobs=tuple(one.logprob for one in token.top_logprobs),
        )
        for token in event.tokens
    )
