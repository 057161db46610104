"""What the verifier committed in one target pass."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from specrag.v1 import common_pb2, verifier_pb2

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.wire.arrays import (
    decode_float32,
    decode_int32,
    decode_token_ids,
    encode_float32,
    encode_int32,
)
from specrag_common.wire.rounds import RoundKey, decode_round_key, encode_round_key


class AnswerEnd(StrEnum):
    """Why an answer ended, as told to callers."""

    STOP = "stop"
    LENGTH = "length"
    CONTEXT = "context"


_ENDS: Final = {
    AnswerEnd.STOP: common_pb2.FINISH_REASON_STOP,
    AnswerEnd.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    AnswerEnd.CONTEXT: common_pb2.FINISH_REASON_CONTEXT,
}
_ENDS_DECODED: Final[dict[int, AnswerEnd | None]] = {
    common_pb2.FINISH_REASON_UNSPECIFIED: None,
    **{message: end for end, message in _ENDS.items()},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """The most likely tokens in one place, best first, with their natural log-probabilities."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTokens:
    """Tokens committed by one target pass.

    Attributes:
        key: copied from the round.
        token_ids: accepted tokens, then the final one unless the answer ended before it.
        logprobs: natural logs under the target's processed law, one a token; see the contract for
            temperature 0.
        accepted_node_idx: tree nodes of the first ``len(accepted_node_idx)`` tokens.
        has_bonus: the last token was drawn after everything on its path was accepted.
        end: set when the answer ends here.
        stop_text_length: code points of the whole answer's text kept, when a stop string ended it.
        forward_time_us: microseconds of the forward pass.
        is_last_of_round: no free-run token of this round follows.
        top_tokens: the likeliest in place of each token; empty unless they were asked for.
        num_pass_tokens: tokens in the forward pass, those of other answers included; 0: not known.
        num_pass_sequences: sequences that shared the forward pass; 0: not known.
    """

    key: RoundKey
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    accepted_node_idx: tuple[int, ...]
    has_bonus: bool
    end: AnswerEnd | None
    stop_text_length: int | None
    forward_time_us: int
    is_last_of_round: bool
    top_tokens: tuple[TopTokens, ...] = ()
    num_pass_tokens: int = 0
    num_pass_sequences: int = 0


def encode_verified(verified: VerifiedTokens) -> verifier_pb2.TokensVerified:
    """Return the message of ``verified``."""
    return verifier_pb2.TokensVerified(
        key=encode_round_key(verified.key),
        token_ids=encode_int32(verified.token_ids),
        logprobs=encode_float32(verified.logprobs),
        accepted_node_idx=encode_int32(verified.accepted_node_idx),
        has_bonus=verified.has_bonus,
        finish_reason=encode_end(verified.end),
        stop_text_length=verified.stop_text_length,
        forward_time_us=verified.forward_time_us,
        last_of_round=verified.is_last_of_round,
        top_tokens=[
            verifier_pb2.TopTokens(
                token_ids=encode_int32(top.token_ids), logprobs=encode_float32(top.logprobs)
            )
            for top in verified.top_tokens
        ],
        num_pass_tokens=verified.num_pass_tokens,
        num_pass_sequences=verified.num_pass_sequences,
    )


def decode_verified(
    message: verifier_pb2.TokensVerified, *, vocab_size: int, field: str = "verified"
) -> VerifiedTokens:
    """Return what ``message`` says was committed.

    Raises:
        InvalidRequest: arrays are malformed or contradict each other.
    """
    ids = decode_token_ids(message.token_ids, f"{field}.token_ids", vocab_size=vocab_size)
    logprobs = decode_float32(message.logprobs, f"{field}.logprobs")
    accepted = decode_int32(message.accepted_node_idx, f"{field}.accepted_node_idx")
    if len(logprobs) != len(ids):
        raise InvalidRequest(f"{field}.logprobs", f"{len(logprobs)} values for {len(ids)} tokens")
    if len(accepted) > len(ids):
        raise InvalidRequest(
            f"{field}.accepted_node_idx", f"{len(accepted)} nodes for {len(ids)} tokens"
        )
    if len(message.top_tokens) not in (0, len(ids)):
        raise InvalidRequest(
            f"{field}.top_tokens", f"{len(message.top_tokens)} entries for {len(ids)} tokens"
        )
    has_stop = message.HasField("stop_text_length")
    return VerifiedTokens(
        key=decode_round_key(message.key, f"{field}.key"),
        token_ids=tuple(ids.tolist()),
        logprobs=tuple(logprobs.tolist()),
        accepted_node_idx=tuple(accepted.tolist()),
        has_bonus=message.has_bonus,
        end=decode_end(message.finish_reason, f"{field}.finish_reason"),
        stop_text_length=message.stop_text_length if has_stop else None,
        forward_time_us=message.forward_time_us,
        is_last_of_round=message.last_of_round,
        top_tokens=tuple(
            _decode_top(top, f"{field}.top_tokens[{idx}]", vocab_size=vocab_size)
            for idx, top in enumerate(message.top_tokens)
        ),
        num_pass_tokens=message.num_pass_tokens,
        num_pass_sequences=message.num_pass_sequences,
    )


def _decode_top(message: verifier_pb2.TopTokens, field: str, *, vocab_size: int) -> TopTokens:
    ids = decode_token_ids(message.token_ids, f"{field}.token_ids", vocab_size=vocab_size)
    logprobs = decode_float32(message.logprobs, f"{field}.logprobs")
    if len(logprobs) != len(ids):
        raise InvalidRequest(f"{field}.logprobs", f"{len(logprobs)} values for {len(ids)} tokens")
    return TopTokens(token_ids=tuple(ids.tolist()), logprobs=tuple(logprobs.tolist()))


def encode_end(end: AnswerEnd | None) -> common_pb2.FinishReason.ValueType:
    """Return the enum value of ``end``; ``None`` is unspecified."""
    return common_pb2.FINISH_REASON_UNSPECIFIED if end is None else _ENDS[end]


def decode_end(value: int, field: str = "finish_reason") -> AnswerEnd | None:
    """Return the end, or ``None`` while the answer is running.

    Raises:
        InvalidRequest: the value is unknown.
    """
    try:
        return _ENDS_DECODED[value]
    except KeyError:
        raise InvalidRequest(field, f"unknown value {value}") from None
