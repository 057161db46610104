"""Prompts made off the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import InvalidRequest
from specrag_inference.prompts import PromptTooLongError

if TYPE_CHECKING:
    from specrag_common.conversation import Conversation
    from specrag_inference.prompts import BuiltPrompt, PromptBuilder


async def fit_prompt(
    builder: PromptBuilder, conversation: Conversation, *, max_tokens: int, field: str
) -> BuiltPrompt:
    """Return the prompt of ``conversation``; tokenization runs in a thread.

    Raises:
        InvalidRequest: reason ``SEQUENCE_TOO_LONG``: the question alone does not fit.
    """
    try:
        return await asyncio.to_thread(builder.build, conversation, max_tokens=max_tokens)
    except PromptTooLongError as exc:
        error = InvalidRequest(field, str(exc), reason="SEQUENCE_TOO_LONG")
        error.metadata = {"num_tokens": str(exc.num_tokens), "max_tokens": str(exc.max_tokens)}
        raise error from exc
