"""From what the target says to what the caller sees; the same for every policy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import ModelFailure
from specrag_common.runtime.span_names import SpanName
from specrag_common.runtime.telemetry import span
from specrag_common.text.detokenizer import IncrementalDetokenizer

from specrag_orchestrator.answering.events import RetrievalDone, TokenUsage
from specrag_orchestrator.answering.logprobs import describe_logprobs
from specrag_orchestrator.answering.transcript import (
    Commit,
    Speculative,
    Transcript,
    TranscriptError,
)
from specrag_orchestrator.citations import Citation, CitationFinder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.verified import AnswerEnd, VerifiedTokens
    from tokenizers import Tokenizer

    from specrag_orchestrator.answering.events import EventStream
    from specrag_orchestrator.answering.stats import AnswerTally
    from specrag_orchestrator.answering.transcript import TextEvent
    from specrag_orchestrator.conversation import Reading
    from specrag_orchestrator.passages import SourcePassage
    from specrag_orchestrator.question import Question
    from specrag_orchestrator.target import PromptAccepted, PromptPrefilled


class ContextShrunkError(Exception):
    """Turns left the context whose passages this question needs: read again without those turns.

    Attributes:
        num_dropped_turns: oldest turns of the session to leave out.
    """

    def __init__(self, num_dropped_turns: int) -> None:
        """Keep the number."""
        super().__init__(f"num_dropped_turns={num_dropped_turns}")
        self.num_dropped_turns = num_dropped_turns


class AnswerProgress:
    """Accumulates one answer: text, tokens, citations, figures; emits its events."""

    def __init__(
        self,
        question: Question,
        reading: Reading,
        *,
        answer_id: str,
        trace_id: str,
        tokenizer: Tokenizer,
        tally: AnswerTally,
        events: EventStream,
    ) -> None:
        """Begin with nothing said."""
        self._question = question
        self._reading = reading
        self._answer_id = answer_id
        self._trace_id = trace_id
        self._events = events
        self._tally = tally
        self._tokenizer = tokenizer
        self._transcript = Transcript(
            IncrementalDetokenizer(tokenizer),
            question.sampling.stop,
            min_tokens=question.sampling.min_tokens,
            show_speculation=question.include_speculative,
        )
        self._finder = CitationFinder((), question.text)
        self._waiting_speculation: Sequence[int] | None = None
        self.is_announced = False
        """Whether the caller knows the passages."""
        self.kept: tuple[SourcePassage, ...] = ()
        """What the target reads, as announced."""
        self.num_dropped_passages = 0
        self.num_dropped_turns = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        """The committed ids."""
        self.citations: list[Citation] = []
        """All that were found, in answer order."""
        self.end: AnswerEnd | None = None
        """Why the answer ended; ``None`` while it runs."""

    @property
    def reading(self) -> Reading:
        """What was composed to be read."""
        return self._reading

    @property
    def text(self) -> str:
        """The committed text."""
        return self._transcript.text

    @property
    def num_retracted_chars(self) -> int:
        """Code points taken back so far."""
        return self._transcript.num_retracted_chars

    @property
    def num_unknown_markers(self) -> int:
        """Inline citation numbers that name no passage the target has read."""
        return self._finder.num_unknown_markers

    @property
    def usage(self) -> TokenUsage:
        """Tokens so far."""
        return TokenUsage(
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            completion_tokens=len(self.token_ids),
        )

    async def on_accepted(self, accepted: PromptAccepted) -> None:
        """Tell the caller the passages that the target reads.

        Raises:
            ContextShrunkError: passages that the question refers to left with their turns.
        """
        kept = frozenset(accepted.kept_passages)
        num_dropped_turns = self._reading.count_dropped_turns(accepted.num_dropped_turns)
        if self._reading.find_missing(kept) and accepted.num_dropped_turns:
            raise ContextShrunkError(num_dropped_turns)
        self.kept = tuple(one for one in self._reading.passages if one.number in kept)
        self.num_prompt_tokens = accepted.num_prompt_tokens
        self.num_dropped_passages = accepted.num_dropped_passages
        self.num_dropped_turns = num_dropped_turns
        self._finder = CitationFinder(self.kept, self._question.text)
        await self._events.put(
            RetrievalDone(
                passages=self.kept,
                num_dropped_passages=self.num_dropped_passages,
                num_dropped_turns=self.num_dropped_turns,
                answer_id=self._answer_id,
                trace_id=self._trace_id,
            )
        )
        self.is_announced = True
        if self._waiting_speculation is not None:
            await self.on_speculation(self._waiting_speculation)

    def on_prefilled(self, prefilled: PromptPrefilled) -> None:
        """The target has read the prompt."""
        self.num_cached_tokens = prefilled.num_cached_tokens
        self._tally.note_prefilled(prefilled.prefill_s)

    async def on_speculation(self, token_ids: Sequence[int]) -> None:
        """Show optimistic text, once the passages are announced."""
        if not self.is_announced:
            self._waiting_speculation = token_ids
            return
        await self._emit(self._transcript.speculate(token_ids))

    async def on_verified(self, verified: VerifiedTokens, tree: TokenTree | None) -> None:
        """Commit tokens; the last ones also end the text.

        Raises:
            ModelFailure: the verifier contradicts what it has committed.
        """
        self._tally.note_verified(verified, tree)
        if self._question.sampling.num_top_logprobs is not None:
            await self._events.put(
                describe_logprobs(verified, self._tokenizer, first_token=len(self.token_ids))
            )
        self.token_ids.extend(verified.token_ids)
        self.end = verified.end
        # Tokens decoded alone come one a message: a span each would drown the trace.
        with span(SpanName.COMMIT) if tree is not None else nullcontext():
            await self._publish(verified)

    async def _publish(self, verified: VerifiedTokens) -> None:
        events = self._commit(verified)
        await self._emit(events)
        if verified.end is not None:
            await self._cite(self._finder.finish(self.text))
        elif any(isinstance(event, Commit) for event in events):
            await self._cite(self._finder.update(self.text))

    def _commit(self, verified: VerifiedTokens) -> list[TextEvent]:
        if verified.end is None:
            return self._transcript.commit(verified.token_ids)
        try:
            return self._transcript.finish_with(verified.token_ids, verified.stop_text_length)
        except TranscriptError as exc:
            raise ModelFailure(f"the verifier contradicts itself: {exc}") from exc

    async def _emit(self, events: Sequence[TextEvent]) -> None:
        for event in events:
            if isinstance(event, Commit):
                self._tally.note_commit()
            elif isinstance(event, Speculative):
                self._tally.note_speculation()
            await self._events.put(event)

    async def _cite(self, citations: Sequence[Citation]) -> None:
        for citation in citations:
            self.citations.append(citation)
            await self._events.put(citation)
