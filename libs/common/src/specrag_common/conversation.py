"""A conversation as structure: turns of passages, a question and an answer.

What the orchestrator composes and the model services turn into token ids. Plain data: nothing
here knows a chat template, a tokenizer or the wire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPassage:
    """A passage as a model reads it.

    Attributes:
        number: citation number, >= 1, the same in every prompt of a session.
        title: title of its document; may be empty.
        text: the passage itself; data, never instructions.
    """

    number: int
    title: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationTurn:
    """One question, what was read for it and, for past turns, what was answered.

    Attributes:
        passages: passages new in this turn, best first.
        question: the question as asked.
        answer: committed text of a past turn's answer; empty for the turn to be answered.
        answer_token_ids: ids of ``answer`` by tokenizer fingerprint; may be empty.
    """

    passages: tuple[PromptPassage, ...]
    question: str
    answer: str = ""
    answer_token_ids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns, oldest first; the last one is to be answered. At least one turn."""

    turns: tuple[ConversationTurn, ...]

    @property
    def last(self) -> ConversationTurn:
        """The turn to be answered."""
        return self.turns[-1]
