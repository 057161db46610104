"""Builds prompts that fit: conversation in, token ids and what was left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag_inference.prompts.chat_frame import learn_frame
from specrag_inference.prompts.layout import (
    INSTRUCTIONS,
    PASSAGES_OPEN,
    format_passage,
    format_question,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.conversation import Conversation, ConversationTurn

    from specrag_inference.prompts.chat_tokenizer import ChatTokenizer

_MIN_NEW_PASSAGES: Final = 2
"""Passages of the last turn that are kept at the price of old turns."""

_MAX_RESERVE_SHARE: Final = 2
"""An answer reserves at most the context divided by this; longer ones end at the context."""


class PromptTooLongError(Exception):
    """Not even the question alone fits the context.

    Attributes:
        num_tokens: tokens of the shortest prompt for this question.
        max_tokens: tokens a prompt may have beside its answer.
    """

    def __init__(self, num_tokens: int, max_tokens: int, max_model_len: int) -> None:
        """Keep both lengths."""
        super().__init__(
            f"the question alone needs num_tokens={num_tokens}, the prompt may have {max_tokens} "
            f"of max_model_len={max_model_len}; shorten the question or lower max_tokens"
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPrompt:
    """A prompt that fits.

    Attributes:
        token_ids: the whole prompt, ready for the answer's first token.
        kept_passages: numbers of all passages in it, earlier turns' included, best first
            within a turn.
        num_dropped_passages: passages of the last turn left out, from the end.
        num_dropped_turns: oldest turns left out whole.
    """

    token_ids: tuple[int, ...]
    kept_passages: tuple[int, ...]
    num_dropped_passages: int
    num_dropped_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _TurnIds:
    """Token ids of one turn, still divisible into its passages."""

    numbers: tuple[int, ...]
    passages: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]


class PromptBuilder:
    """Turns conversations into prompts for one model. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        max_model_len: int,
        instructions: str = INSTRUCTIONS,
    ) -> None:
        """Learn the model's chat frame.

        Args:
            tokenizer: the model's own, with its chat template; stored answer ids of its
                fingerprint are used as they are.
            max_model_len: longest sequence, prompt and answer, in tokens.
            instructions: system message; trusted text only.

        Raises:
            ChatTemplateError: the chat template is not usable for conversations.
        """
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        frame = learn_frame(tokenizer.render, instructions)
        self._opening = tokenizer.encode_template(frame.opening)
        self._to_answer = tokenizer.encode_template(frame.to_answer)
        self._to_question = tokenizer.encode_template(frame.to_question)
        self._passages_open = tokenizer.encode_content(PASSAGES_OPEN)

    def build(self, conversation: Conversation, *, max_tokens: int) -> BuiltPrompt:
        """Return the longest prompt that leaves room for the answer.

        Passages of the last turn go first, from the end, down to two; then the oldest turns, whole,
        one after the other; then the last two passages.

        Args:
            conversation: at least one turn; the last one is to be answered.
            max_tokens: most answer tokens; at most half the context is reserved for them.

        Raises:
            PromptTooLongError: the question alone leaves no room.
        """
        limit = self._max_model_len - min(max_tokens, self._max_model_len // _MAX_RESERVE_SHARE)
        turns = [self._encode_turn(turn) for turn in conversation.turns]
        num_dropped_turns, num_kept = self._fit(turns, limit)
        kept = turns[num_dropped_turns:]
        kept[-1] = _keep_passages(kept[-1], num_kept)
        return BuiltPrompt(
            token_ids=tuple(self._join(kept)),
            kept_passages=tuple(number for turn in kept for number in turn.numbers),
            num_dropped_passages=len(turns[-1].numbers) - num_kept,
            num_dropped_turns=num_dropped_turns,
        )

    def _fit(self, turns: Sequence[_TurnIds], limit: int) -> tuple[int, int]:
        """Return how many oldest turns to drop and how many new passages to keep."""
        last = turns[-1]
        fixed = len(self._opening) + len(last.question) + len(self._to_answer)
        past = [self._count_past(turn) for turn in turns[:-1]]
        for num_dropped in range(len(turns)):
            room = limit - fixed - sum(past[num_dropped:])
            num_kept = self._count_fitting(last.passages, room)
            is_alone = num_dropped == len(turns) - 1
            least = 0 if is_alone else min(_MIN_NEW_PASSAGES, len(last.passages))
            if room >= 0 and num_kept >= least:
                return num_dropped, num_kept
        raise PromptTooLongError(fixed, limit, self._max_model_len)

    def _count_past(self, turn: _TurnIds) -> int:
        """Return the tokens a past turn adds to the prompt."""
        num_passage_tokens = sum(map(len, turn.passages))
        block = len(self._passages_open) if turn.passages else 0
        frame = len(self._to_answer) + len(self._to_question)
        return num_passage_tokens + block + len(turn.question) + len(turn.answer) + frame

    def _count_fitting(self, passages: Sequence[tuple[int, ...]], room: int) -> int:
        """Return how many of the first passages fit ``room`` tokens, their block included."""
        num_tokens = len(self._passages_open)
        for num_kept, passage in enumerate(passages):
            num_tokens += len(passage)
            if num_tokens > room:
                return num_kept
        return len(passages)

    def _encode_turn(self, turn: ConversationTurn) -> _TurnIds:
        encode = self._tokenizer.encode_content
        return _TurnIds(
            numbers=tuple(passage.number for passage in turn.passages),
            passages=tuple(tuple(encode(format_passage(one))) for one in turn.passages),
            question=tuple(encode(format_question(turn.question))),
            answer=self._encode_answer(turn),
        )

    def _encode_answer(self, turn: ConversationTurn) -> tuple[int, ...]:
        """Return a past answer's ids: the stored ones when they are exactly its text."""
        stored = list(turn.answer_token_ids.get(self._tokenizer.fingerprint, ()))
        special_ids = self._tokenizer.special_ids
        if stored and stored[-1] in special_ids:
            stored.pop()  # the frame ends the answer itself
        is_plain = all(0 <= one < self._tokenizer.vocab_size for one in stored) and (
            special_ids.isdisjoint(stored)
        )
        if stored and is_plain and self._tokenizer.decode(stored) == turn.answer:
            return tuple(stored)
        return tuple(self._tokenizer.encode_content(turn.answer))

    def _join(self, turns: Sequence[_TurnIds]) -> list[int]:
        token_ids = list(self._opening)
        for idx, turn in enumerate(turns):
            if idx:
                token_ids += turns[idx - 1].answer
                token_ids += self._to_question
            if turn.passages:
                token_ids += self._passages_open
                for passage in reversed(turn.passages):
                    token_ids += passage
            token_ids += turn.question
            token_ids += self._to_answer
        return token_ids


def _keep_passages(turn: _TurnIds, num_kept: int) -> _TurnIds:
    return _TurnIds(
        numbers=turn.numbers[:num_kept],
        passages=turn.passages[:num_kept],
        question=turn.question,
        answer=turn.answer,
    )
