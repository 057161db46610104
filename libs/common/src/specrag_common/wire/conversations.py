"""Structured prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from specrag.v1 import common_pb2

from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.runtime.errors import InvalidRequest
from specrag_common.wire.arrays import decode_int32, encode_int32

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TURNS: Final = 256
MAX_PASSAGES_PER_TURN: Final = 256


def encode_conversation(conversation: Conversation) -> common_pb2.Prompt:
    """Return the message of ``conversation``: what a model reads, without retrieval details."""
    return common_pb2.Prompt(turns=[_encode_turn(turn) for turn in conversation.turns])


def decode_conversation(message: common_pb2.Prompt, field: str = "prompt") -> Conversation:
    """Return the conversation of ``message``.

    Ids of past answers are only held against 0; the vocabulary is checked where they are used.

    Raises:
        InvalidRequest: no turn or too many, a blank question, an answer to the last one, too many
            passages, a passage without a number or with one used twice.
    """
    if not 1 <= len(message.turns) <= MAX_TURNS:
        raise InvalidRequest(f"{field}.turns", f"{len(message.turns)} turns, need 1 to {MAX_TURNS}")
    turns = tuple(
        _decode_turn(turn, f"{field}.turns[{idx}]") for idx, turn in enumerate(message.turns)
    )
    if turns[-1].answer or turns[-1].answer_token_ids:
        raise InvalidRequest(
            f"{field}.turns[{len(turns) - 1}].answer",
            "the last turn is to be answered: leave empty",
        )
    _check_numbers(turns, field)
    return Conversation(turns=turns)


def _encode_turn(turn: ConversationTurn) -> common_pb2.PromptTurn:
    return common_pb2.PromptTurn(
        passages=[
            common_pb2.Passage(number=passage.number, title=passage.title, text=passage.text)
            for passage in turn.passages
        ],
        question=turn.question,
        answer=turn.answer,
        answer_token_ids=[
            common_pb2.TokenIds(tokenizer_fingerprint=name, token_ids=encode_int32(ids))
            for name, ids in turn.answer_token_ids.items()
        ],
    )


def _decode_turn(message: common_pb2.PromptTurn, field: str) -> ConversationTurn:
    if not message.question.strip():
        raise InvalidRequest(f"{field}.question", "the question is blank")
    if len(message.passages) > MAX_PASSAGES_PER_TURN:
        raise InvalidRequest(
            f"{field}.passages", f"{len(message.passages)} exceed {MAX_PASSAGES_PER_TURN}"
        )
    answer_token_ids = {
        one.tokenizer_fingerprint: _decode_answer_ids(one, f"{field}.answer_token_ids[{idx}]")
        for idx, one in enumerate(message.answer_token_ids)
    }
    return ConversationTurn(
        passages=tuple(
            PromptPassage(number=passage.number, title=passage.title, text=passage.text)
            for passage in message.passages
        ),
        question=message.question,
        answer=message.answer,
        answer_token_ids=answer_token_ids,
    )


def _decode_answer_ids(message: common_pb2.TokenIds, field: str) -> tuple[int, ...]:
    ids = decode_int32(message.token_ids, f"{field}.token_ids")
    if (ids < 0).any():
        raise InvalidRequest(f"{field}.token_ids", f"token id {ids.min()} is negative")
    return tuple(ids.tolist())


def _check_numbers(turns: Sequence[ConversationTurn], field: str) -> None:
    seen: set[int] = set()
    for turn_idx, turn in enumerate(turns):
        for idx, passage in enumerate(turn.passages):
            where = f"{field}.turns[{turn_idx}].passages[{idx}].number"
            if passage.number < 1:
                raise InvalidRequest(where, f"{passage.number} is less than 1")
            if passage.number in seen:
                raise InvalidRequest(where, f"{passage.number} is used twice in this prompt")
            seen.add(passage.number)
