"""One answer at the target: prompt, prefill, then round after round."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import FailedPrecondition, InvalidRequest
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span
from specrag_common.speculation.token_tree import TokenTree
from specrag_common.wire.rounds import PrefixHash, RoundKey
from specrag_inference.messages import OpenSequence
from specrag_serving.convert import to_cache_scope, to_engine_sampling
from specrag_serving.fitting import fit_prompt

from specrag_verifier.convert import RoundOrder, to_verified

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from specrag_common.wire.verified import VerifiedTokens
    from specrag_inference.messages import SequenceOpened
    from specrag_inference.prompts import BuiltPrompt, PromptBuilder
    from specrag_serving.engine_host import EngineHost, EngineSequence
    from specrag_serving.live_answers import LiveAnswers
    from specrag_serving.model_files import ModelFiles

    from specrag_verifier.convert import AnswerOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """Everything one replica needs to serve answers.

    Attributes:
        files: the model as its folder describes it.
        prompts: makes its prompts.
        engine: computes.
        dtype: of weights and activations.
    """

    files: ModelFiles
    prompts: PromptBuilder
    engine: EngineHost
    dtype: str


class AnswerVerification:
    """One answer's sequence at the target. Rounds go in one after the other."""

    def __init__(self, order: AnswerOrder, prompt: BuiltPrompt, sequence: EngineSequence) -> None:
        """Made by :func:`open_verification`."""
        self.prompt = prompt
        self._order = order
        self._sequence = sequence
        self._prefix = PrefixHash(order.committed_token_ids)
        self._last_round = -1
        self.has_ended = False

    async def wait_prefilled(self) -> SequenceOpened:
        """Return once the prompt is in the cache."""
        with span(SpanName.PREFILL, {SpanKey.INPUT_TOKENS: len(self.prompt.token_ids)}) as step:
            event = await self._sequence.wait_opened()
            step.set_attribute(SpanKey.NUM_CACHED_TOKENS, event.num_cached_tokens)
            return event

    async def verify(self, order: RoundOrder) -> AsyncGenerator[VerifiedTokens]:
        """Run a round and yield what each target pass committed.

        Raises:
            InvalidRequest: the round belongs to another answer or comes out of order.
            FailedPrecondition: it continues other tokens than the committed ones.
        """
        self._check_key(order.key)
        self._last_round = order.key.round
        attributes: dict[str, int] = {
            SpanKey.ROUND: order.key.round,
            SpanKey.NUM_DRAFT_TOKENS: len(order.tree.proposals),
        }
        num_accepted = 0
        with span(SpanName.VERIFY, attributes) as step:
            async for event in self._sequence.verify(
                order.key.round, order.tree, free_run_tokens=order.free_run_tokens
            ):
                verified = to_verified(order.key, event)
                self._prefix.update(verified.token_ids)
                self.has_ended = verified.end is not None
                num_accepted += len(verified.accepted_node_idx)
                step.set_attribute(SpanKey.NUM_ACCEPTED_TOKENS, num_accepted)
                yield verified

    async def generate(self) -> AsyncGenerator[VerifiedTokens]:
        """Decode to the end as one free run: the path that rounds without drafts take."""
        key = RoundKey(
            answer_id=self._order.answer_id,
            round=0,
            drafter_index=0,
            committed_length=self._prefix.length,
            prefix_hash=self._prefix.value,
        )
        order = RoundOrder(
            key=key, tree=TokenTree.empty(), free_run_tokens=self._order.sampling.max_tokens
        )
        async for verified in self.verify(order):
            yield verified

    def _check_key(self, key: RoundKey) -> None:
        if key.answer_id != self._order.answer_id:
            raise InvalidRequest(
                "round.key.answer_id",
                f"'{key.answer_id}' is not the answer of this stream, '{self._order.answer_id}'",
            )
        if key.round <= self._last_round:
            raise InvalidRequest(
                "round.key.round", f"{key.round} comes after round {self._last_round}"
            )
        if key.committed_length != self._prefix.length:
            raise FailedPrecondition(
                f"round {key.round} continues committed_length={key.committed_length}, "
                f"but {self._prefix.length} tokens are committed",
                reason="STALE_ROUND",
            )
        if key.prefix_hash != self._prefix.value:
            raise FailedPrecondition(
                f"round {key.round} continues other tokens than the {self._prefix.length} "
                "committed ones: the prefix hashes differ",
                reason="STALE_ROUND",
            )


async def fit_order(target: TargetModel, order: AnswerOrder) -> BuiltPrompt:
    """Return the prompt of an order, fitted to the context.

    Raises:
        InvalidRequest: the question alone does not fit, or the tokens committed already do not.
    """
    prompt = await fit_prompt(
        target.prompts,
        order.conversation,
        max_tokens=order.sampling.max_tokens,
        field="open.prompt",
    )
    num_tokens = len(prompt.token_ids) + len(order.committed_token_ids)
    if num_tokens >= target.files.max_model_len:
        raise InvalidRequest(
            "open.committed_token_ids",
            f"prompt and committed tokens, {num_tokens}, leave no room in "
            f"max_model_len={target.files.max_model_len}",
            reason="SEQUENCE_TOO_LONG",
        )
    return prompt


@contextmanager
def open_verification(
    target: TargetModel, order: AnswerOrder, prompt: BuiltPrompt, live: LiveAnswers
) -> Iterator[AnswerVerification]:
    """Admit an answer to the engine while the block runs; its blocks are freed on every way out.

    Raises:
        AlreadyExists: the answer is live already.
        Capacity: the engine lags behind.
        UpstreamUnavailable: the engine is gone.
    """
    with live.claim(order.answer_id, f"answer '{order.answer_id}'"):
        command = OpenSequence(
            sequence_id=order.answer_id,
            prompt_token_ids=prompt.token_ids,
            answer_token_ids=order.committed_token_ids,
            cache_scope=to_cache_scope(order.tenant),
            sampling=to_engine_sampling(order.sampling, target.files.eos_token_ids),
            mode=order.mode,
            random_key=order.random_key,
        )
        with target.engine.open(command) as sequence:
            yield AnswerVerification(order, prompt, sequence)
