"""What a chat template writes around contents, learned once with marks in the contents' place.

The frame of a conversation is three texts: before the first user's content, between a user's
content and the answer, and between an answer and the next user's content. They are found by
rendering unguessable marks, so no content ever goes through the template. A template whose frame
depends on how long the conversation is would make prompts that are not append-only: it is refused.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Messages = Sequence[Mapping[str, str]]


class ChatTemplateError(Exception):
    """The model's chat template is missing, malformed or not usable for conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFrame:
    """Template text around the contents of a conversation.

    Attributes:
        opening: before the first user's content; holds the instructions.
        to_answer: from the end of a user's content to the begin of the answer.
        to_question: from the end of an answer to the begin of the next user's content.
    """

    opening: str
    to_answer: str
    to_question: str


def learn_frame(render: Callable[[Messages], str], instructions: str) -> ChatFrame:
    """Return the frame of a chat template.

    Instructions stand in the system role where the template has one, else before the first
    question.

    Args:
        render: renders messages, ready for the assistant to go on.
        instructions: trusted text; never anything retrieved or asked.

    Raises:
        ChatTemplateError: the template alters contents or is not append-only.
    """
    try:
        return _learn(render, [{"role": "system", "content": instructions}], "", instructions)
    except ChatTemplateError:
        return _learn(render, [], f"{instructions}\n\n", instructions)


def _learn(
    render: Callable[[Messages], str],
    system: list[Mapping[str, str]],
    first_prefix: str,
    instructions: str,
) -> ChatFrame:
    opening, *rest = _split(render, system, first_prefix, num_turns=3)
    if instructions not in opening:
        raise ChatTemplateError("the chat template drops the system message")
    to_answer, to_question, *repeated = rest
    single = _split(render, system, first_prefix, num_turns=1)
    if repeated != [to_answer, to_question, to_answer] or single != [opening, to_answer]:
        raise ChatTemplateError(
            "the chat template is not append-only: its text around a turn depends on later turns"
        )
    return ChatFrame(opening=opening, to_answer=to_answer, to_question=to_question)


def _split(
    render: Callable[[Messages], str],
    system: list[Mapping[str, str]],
    first_prefix: str,
    *,
    num_turns: int,
) -> list[str]:
    """Render a conversation of marks and return the texts around them."""
    marks = [f"mark{secrets.token_hex(16)}" for _ in range(2 * num_turns - 1)]
    messages = [
        {"role": "user" if idx % 2 == 0 else "assistant", "content": mark}
        for idx, mark in enumerate(marks)
    ]
    messages[0]["content"] = first_prefix + marks[0]
    rest = render([*system, *messages])
    pieces = []
    for mark in marks:
        piece, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise ChatTemplateError("the chat template drops, repeats or reorders contents")
        pieces.append(piece)
    return [*pieces, rest]
