"""Real RAG prompts of about one length, as every peer reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_inference.prompts import ChatTokenizer, PromptBuilder

from bench.question_sets import load_questions

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from bench.question_sets import ClosedQuestion

SET_NAMES = ("techqa", "hotpotqa")
MAX_LOOKED_AT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RagPrompt:
    """One question as the target and the drafters read it.

    Attributes:
        question: with its passages.
        token_ids: the target's prompt, all passages.
        subset_ids: each drafter's prompt: passage ``n`` goes to drafter ``(n - 1) mod M``.
    """

    question: ClosedQuestion
    token_ids: tuple[int, ...]
    subset_ids: tuple[tuple[int, ...], ...]


class PromptMaker:
    """Builds prompts as the model services do."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, max_tokens: int, max_model_len: int
    ) -> None:
        """Learn the model's chat frame; ``max_tokens`` are reserved for the answer."""
        self._builder = PromptBuilder(
            ChatTokenizer.from_transformers(tokenizer), max_model_len=max_model_len
        )
        self._max_tokens = max_tokens

    def make(self, question: ClosedQuestion, *, num_drafters: int) -> RagPrompt:
        """Return the prompts of one question."""
        passages = _number(question)
        return RagPrompt(
            question=question,
            token_ids=self.build_target(question),
            subset_ids=tuple(
                self.build(passages[idx::num_drafters], question.question)
                for idx in range(num_drafters)
            ),
        )

    def build_target(self, question: ClosedQuestion) -> tuple[int, ...]:
        """Return the prompt over all passages."""
        return self.build(_number(question), question.question)

    def build_over(self, passages_of: ClosedQuestion, question: str) -> tuple[int, ...]:
        """Return the prompt of a question over another question's passages."""
        return self.build(_number(passages_of), question)

    def build(self, passages: Sequence[PromptPassage], question: str) -> tuple[int, ...]:
        """Return the prompt over some passages."""
        turn = ConversationTurn(passages=tuple(passages), question=question)
        built = self._builder.build(Conversation(turns=(turn,)), max_tokens=self._max_tokens)
        return built.token_ids


def choose_prompts(
    folder: Path, maker: PromptMaker, *, num_prompts: int, about_tokens: int, num_drafters: int
) -> list[RagPrompt]:
    """Return the prompts nearest to a length, as many of each set, in turns.

    Args:
        folder: holds ``NAME.jsonl`` of both sets.
        maker: builds prompts.
        num_prompts: in all.
        about_tokens: the length aimed at.
        num_drafters: subsets a prompt.
    """
    chosen: list[list[ClosedQuestion]] = []
    for name in SET_NAMES:
        questions = load_questions(folder, name, limit=MAX_LOOKED_AT)
        questions.sort(key=lambda one: abs(len(maker.build_target(one)) - about_tokens))
        chosen.append(questions[: -(-num_prompts // len(SET_NAMES))])
    in_turns = [question for pair in zip(*chosen, strict=True) for question in pair]
    return [maker.make(question, num_drafters=num_drafters) for question in in_turns[:num_prompts]]


def _number(question: ClosedQuestion) -> list[PromptPassage]:
    return [
        PromptPassage(number=number, title=passage.title, text=passage.text)
        for number, passage in enumerate(question.passages, 1)
    ]
