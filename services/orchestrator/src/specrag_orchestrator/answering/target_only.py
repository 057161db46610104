"""TARGET_ONLY: the target decodes alone."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from specrag_orchestrator.target import PromptAccepted, PromptPrefilled

if TYPE_CHECKING:
    from specrag_orchestrator.answering.progress import AnswerProgress
    from specrag_orchestrator.target import TargetStream


async def answer_alone(stream: TargetStream, progress: AnswerProgress) -> None:
    """Hand everything the target says to ``progress`` until the answer has ended."""
    async with aclosing(stream.messages()) as messages:
        async for message in messages:
            if isinstance(message, PromptAccepted):
                await progress.on_accepted(message)
            elif isinstance(message, PromptPrefilled):
                progress.on_prefilled(message)
            else:
                await progress.on_verified(message, None)
