"""Drafting for one answer: from the subset's own words, and from the draft model where asked.

Suffix branches cost no forward pass and never wait for one. Model branches follow them in the same
proposal once the model has read the prompt. A round that continues other tokens than this drafter
knows of is answered by an empty proposal and counted: it is stale, never an error.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import InvalidRequest
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span
from specrag_common.speculation.proposals import DraftProposal
from specrag_common.speculation.suffix_drafter import SuffixDrafter
from specrag_common.wire.proposals import KeyedProposal
from specrag_common.wire.rounds import PrefixHash
from specrag_inference.messages import OpenSequence
from specrag_serving.convert import to_cache_scope, to_engine_sampling

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specrag_common.speculation.proposals import DraftBranch
    from specrag_inference.messages import SequenceOpened
    from specrag_inference.prompts import BuiltPrompt
    from specrag_serving.engine_host import EngineHost, EngineSequence

    from specrag_drafter.convert import DraftingOrder, DraftRoundOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingProposal:
    """A round that has been taken up.

    Attributes:
        order: the round.
        branches: suffix branches, ready.
        waits_for_model: the model's branches are still to come.
        started_s: monotonic time of the round's arrival.
    """

    order: DraftRoundOrder
    branches: tuple[DraftBranch, ...]
    waits_for_model: bool
    started_s: float


class SuffixSource:
    """Branches copied from what this drafter has read; each ends at an end-of-answer token."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        """Draft with ``drafter``, which is this answer's own."""
        self._drafter = drafter

    @classmethod
    async def read(cls, token_ids: Iterable[int], eos_token_ids: Iterable[int]) -> SuffixSource:
        """Index a prompt and the answer so far, off the event loop."""
        return cls(
            await asyncio.to_thread(SuffixDrafter, token_ids, end_token_ids=tuple(eos_token_ids))
        )

    def commit(self, token_ids: Iterable[int]) -> None:
        """Append committed tokens."""
        self._drafter.extend(token_ids)

    def propose(self, order: DraftRoundOrder) -> tuple[DraftBranch, ...]:
        """Return the branches of a round, best first."""
        return tuple(
            self._drafter.propose(
                order.gamma, order.num_branches, min_probability=order.min_probability
            )
        )


class ModelSource:
    """Branches drawn from the draft model. Close it in ``finally``."""

    def __init__(self, sequence: EngineSequence, num_prompt_tokens: int) -> None:
        """Own an open sequence whose prefill has begun."""
        self._sequence = sequence
        self._num_prompt_tokens = num_prompt_tokens
        self._uncommitted: list[int] = []
        self._opening = asyncio.ensure_future(self._wait_opened())

    @property
    def has_read(self) -> bool:
        """Whether the prompt is in the cache; raises what went wrong with it."""
        return self._opening.done() and self._opening.result() is not None

    async def wait_read(self) -> SequenceOpened:
        """Return once the prompt is in the cache."""
        return await self._opening

    def commit(self, token_ids: Iterable[int]) -> None:
        """Note committed tokens; they travel with the next round."""
        self._uncommitted.extend(token_ids)

    def ask(self, order: DraftRoundOrder) -> None:
        """Ask for a round's branches; an earlier round still being drawn is cut short."""
        committed, self._uncommitted = tuple(self._uncommitted), []
        self._sequence.ask_proposal(
            order.key.round, committed, gamma=order.gamma, num_branches=order.num_branches
        )

    async def receive(self) -> tuple[DraftBranch, ...]:
        """Return the branches of the oldest round asked for."""
        return (await self._sequence.receive_proposal()).branches

    def close(self) -> None:
        """Free the sequence."""
        if not self._opening.cancel() and not self._opening.cancelled():
            self._opening.exception()  # a failure that nobody waited for is no news any more
        self._sequence.close()

    async def _wait_opened(self) -> SequenceOpened:
        with span(SpanName.PREFILL, {SpanKey.INPUT_TOKENS: self._num_prompt_tokens}) as step:
            event = await self._sequence.wait_opened()
            step.set_attribute(SpanKey.NUM_CACHED_TOKENS, event.num_cached_tokens)
            return event


class AnswerDrafting:
    """One drafter's work for one answer. Rounds are taken up and completed in one order."""

    def __init__(
        self, order: DraftingOrder, suffix: SuffixSource | None, model: ModelSource | None
    ) -> None:
        """Propose from the sources given."""
        self._order = order
        self._suffix = suffix
        self._model = model
        self._prefix = PrefixHash(order.committed_token_ids)
        self.num_rounds = 0
        self.num_stale = 0
        self.num_draft_tokens = 0

    def take_up(self, order: DraftRoundOrder) -> PendingProposal:
        """Commit what the round brings and begin to draft.

        Raises:
            InvalidRequest: the round belongs to another answer or drafter.
        """
        started_s = time.perf_counter()
        self._check_key(order)
        self.num_rounds += 1
        branches: tuple[DraftBranch, ...] = ()
        waits_for_model = False
        if self._commit(order):
            if self._suffix is not None:
                branches = self._suffix.propose(order)
            if self._model is not None and self._model.has_read:
                self._model.ask(order)
                waits_for_model = True
        return PendingProposal(
            order=order,
            branches=branches,
            waits_for_model=waits_for_model,
            started_s=started_s,
        )

    async def complete(self, pending: PendingProposal) -> KeyedProposal:
        """Return the proposal of the oldest round taken up, once all its branches are there."""
        branches = pending.branches
        if pending.waits_for_model:
            assert self._model is not None, "only a model source makes a round wait"
            branches += await self._model.receive()
        self.num_draft_tokens += sum(len(branch.token_ids) for branch in branches)
        key = pending.order.key
        return KeyedProposal(
            key=key,
            proposal=DraftProposal(
                drafter_index=key.drafter_index,
                committed_length=key.committed_length,
                branches=branches,
                gamma=pending.order.gamma,
            ),
            draft_time_us=round((time.perf_counter() - pending.started_s) * 1e6),
        )

    def _commit(self, order: DraftRoundOrder) -> bool:
        """Take the round's tokens if they continue this drafter's; else count it as stale."""
        token_ids, key = order.committed_token_ids, order.key
        after = self._prefix.extended(token_ids)
        if (after.length, after.value) != (key.committed_length, key.prefix_hash):
            self.num_stale += 1
            return False
        self._prefix = after
        if self._suffix is not None:
            self._suffix.commit(token_ids)
        if self._model is not None:
            self._model.commit(token_ids)
        return True

    def _check_key(self, order: DraftRoundOrder) -> None:
        key = order.key
        if key.answer_id != self._order.answer_id:
            raise InvalidRequest(
                "round.key.answer_id",
                f"'{key.answer_id}' is not the answer of this stream, '{self._order.answer_id}'",
            )
        if key.drafter_index != self._order.drafter_index:
            raise InvalidRequest(
                "round.key.drafter_index",
                f"{key.drafter_index} is not this stream's {self._order.drafter_index}",
            )


def open_model_source(
    engine: EngineHost,
    order: DraftingOrder,
    prompt: BuiltPrompt,
    eos_token_ids: Iterable[int],
) -> ModelSource:
    """Admit the answer to the draft model and begin its prefill.

    Raises:
        Capacity: the engine lags behind.
        UpstreamUnavailable: the engine is gone.
    """
    command = OpenSequence(
        sequence_id=f"{order.answer_id}/{order.drafter_index}",
        prompt_token_ids=prompt.token_ids,
        answer_token_ids=order.committed_token_ids,
        cache_scope=to_cache_scope(order.tenant),
        sampling=to_engine_sampling(order.sampling, eos_token_ids),
        mode=order.mode,
        random_key=order.random_key,
        drafter_index=order.drafter_index,
    )
    return ModelSource(engine.open(command), len(prompt.token_ids))
