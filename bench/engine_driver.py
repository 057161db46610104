"""Drives an engine in this process step by step, and keeps apart what each sequence is told."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    SequenceFailed,
    SequenceOpened,
    VerifyTree,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.engine import Engine
    from specrag_inference.messages import EngineEvent

EventT = TypeVar("EventT")


class EngineRefusedError(Exception):
    """The engine failed a sequence; its message says why."""


class EngineDriver:
    """Sequences of one engine, all greedy; an end-of-sequence token ends nothing."""

    def __init__(self, engine: Engine) -> None:
        """Drive an engine that nobody else steps."""
        self.engine = engine
        self._events: dict[str, list[EngineEvent]] = defaultdict(list)

    def begin(
        self,
        sequence_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        cache_scope: bytes = b"",
    ) -> None:
        """Have a sequence opened; nothing is computed yet."""
        self.engine.submit(
            OpenSequence(
                sequence_id=sequence_id,
                prompt_token_ids=tuple(prompt_ids),
                cache_scope=cache_scope,
                sampling=SamplingParams(max_tokens=max_tokens),
            )
        )

    def open(
        self,
        sequence_id: str,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        cache_scope: bytes = b"",
    ) -> SequenceOpened:
        """Return once the prompt is in the cache."""
        self.begin(sequence_id, prompt_ids, max_tokens=max_tokens, cache_scope=cache_scope)
        return self.wait(sequence_id, SequenceOpened)

    def verify(
        self, sequence_id: str, tree: TokenTree, *, round_number: int = 0, free_run: int = 0
    ) -> list[int]:
        """Return the tokens that a round commits."""
        self.engine.submit(
            VerifyTree(
                sequence_id=sequence_id, round=round_number, tree=tree, free_run_tokens=free_run
            )
        )
        token_ids: list[int] = []
        while True:
            verified = self.wait(sequence_id, RoundVerified)
            token_ids += [token.token_id for token in verified.tokens]
            if verified.last:
                return token_ids

    def decode(self, sequence_id: str, num_tokens: int) -> list[int]:
        """Return tokens decoded alone, one a pass."""
        return self.verify(sequence_id, TokenTree.empty(), free_run=num_tokens - 1)

    def free(self, sequence_id: str) -> None:
        """Forget a sequence and what it was told."""
        self.engine.submit(FreeSequence(sequence_id=sequence_id))
        self._events.pop(sequence_id, None)

    def wait(self, sequence_id: str, kind: type[EventT]) -> EventT:
        """Step until the sequence is told something of a kind; take and return it.

        Raises:
            EngineRefusedError: a sequence failed.
        """
        while True:
            found = self.take(sequence_id, kind)
            if found:
                return found[0]
            self.step()

    def take(self, sequence_id: str, kind: type[EventT]) -> list[EventT]:
        """Take the first event of a kind that the sequence was told; empty without one."""
        events = self._events[sequence_id]
        for idx, event in enumerate(events):
            if isinstance(event, kind):
                del events[idx]
                return [event]
        return []

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            EngineRefusedError: a sequence failed.
        """
        for event in self.engine.step():
            if isinstance(event, SequenceFailed):
                raise EngineRefusedError(f"{event.sequence_id}: {event.code}: {event.message}")
            self._events[event.sequence_id].append(event)
