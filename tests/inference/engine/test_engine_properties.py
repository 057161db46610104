"""Random lives of many sequences on a small cache: books stay right, tokens too."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import (
    FreeSequence,
    RoundVerified,
    SequenceFailed,
    SequenceOpened,
)
from specrag_inference.testing import build_byte_tokenizer, build_random_model, drain

from tests.inference.engine.commands import (
    decode_command,
    draw_tokens,
    list_tokens,
    open_command,
    propose_command,
    score_chain_command,
    verify_command,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_inference.messages import EngineEvent
    from specrag_inference.models.loading import LoadedModel

NUM_BLOCKS = 18
SHARED = draw_tokens(0, 70)
ANSWER_TOKENS = 40


@cache
def get_model() -> LoadedModel:
    return build_random_model("llama", seed=0)


def build_engine(num_blocks: int, clock: Callable[[], float]) -> Engine:
    config = EngineConfig(
        num_blocks=num_blocks, max_step_tokens=48, max_shared_prefill_tokens=16, max_sequences=5
    )
    return Engine(get_model(), build_byte_tokenizer(), config, clock=clock)


@cache
def decode_alone(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The answer on an engine with nobody else; tests elsewhere hold it to transformers."""
    engine = build_engine(64, lambda: 0.0)
    engine.submit(open_command("a", prompt, max_tokens=ANSWER_TOKENS))
    drain(engine)
    engine.submit(decode_command("a", ANSWER_TOKENS))
    return tuple(list_tokens(drain(engine)))


class EngineMachine(RuleBasedStateMachine):
    """Opens, verifies, drafts, scores, frees, expires and preempts in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.engine = build_engine(NUM_BLOCKS, lambda: self.now)
        self.prompts: dict[str, tuple[int, ...]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ready: set[str] = set()
        self.num_opened = 0

    @rule(
        kept=st.integers(0, 70),
        own=st.integers(1, 20),
        deadline_s=st.none() | st.integers(1, 40),
    )
    def open(self, kept: int, own: int, deadline_s: int | None) -> None:
        name = f"s{self.num_opened}"
        self.num_opened += 1
        prompt = (*SHARED[:kept], *draw_tokens(own, own))
        self.engine.submit(
            open_command(name, prompt, max_tokens=ANSWER_TOKENS, deadline_s=deadline_s)
        )
        self.prompts[name] = prompt
        self.tokens[name] = []

    def pick(self, data: st.DataObject) -> str:
        name = data.draw(st.sampled_from(sorted(self.ready)))
        self.ready.discard(name)
        return name

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), num_right=st.integers(0, 6), num_wrong=st.integers(0, 4))
    def verify(self, data: st.DataObject, num_right: int, num_wrong: int) -> None:
        name = self.pick(data)
        truth = decode_alone(self.prompts[name])[len(self.tokens[name]) :]
        branches = [[*truth[:num_right], *range(num_wrong)], list(range(num_right + 1))]
        self.engine.submit(verify_command(name, *[branch for branch in branches if branch]))

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def decode(self, data: st.DataObject, num_tokens: int) -> None:
        self.engine.submit(decode_command(self.pick(data), num_tokens))

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), length=st.integers(1, 90))
    def score(self, data: st.DataObject, length: int) -> None:
        name = self.pick(data)
        self.engine.submit(score_chain_command(name, draw_tokens(length, length)))
        self.ready.add(name)

    @precondition(lambda self: self.ready)
    @rule(data=st.data(), gamma=st.integers(0, 5), num_branches=st.integers(1, 3))
    def draft(self, data: st.DataObject, gamma: int, num_branches: int) -> None:
        name = self.pick(data)
        self.engine.submit(propose_command(name, gamma=gamma, num_branches=num_branches))
        self.ready.add(name)

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.engine.submit(FreeSequence(sequence_id=name))
        self.forget(name)

    @rule(num_steps=st.integers(1, 12))
    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for event in self.engine.step():
                self.take(event)
            self.engine.check_integrity()

    @rule(seconds=st.integers(1, 10))
    def let_time_pass(self, seconds: int) -> None:
        self.now += seconds

    def take(self, event: EngineEvent) -> None:
        name = event.sequence_id
        if isinstance(event, SequenceFailed):
            assert event.code in {"DEADLINE", "CAPACITY"}, event
            self.forget(name)
        elif isinstance(event, SequenceOpened):
            self.ready.add(name)
        elif isinstance(event, RoundVerified):
            self.tokens[name] += [token.token_id for token in event.tokens]
            truth = decode_alone(self.prompts[name])
            assert tuple(self.tokens[name]) == truth[: len(self.tokens[name])]
            if event.last and event.finish_reason is None:
                self.ready.add(name)

    def forget(self, name: str) -> None:
        del self.prompts[name], self.tokens[name]
        self.ready.discard(name)

    @invariant()
    def books_agree(self) -> None:
        self.engine.check_integrity()

    def teardown(self) -> None:
        for event in drain(self.engine):
            self.take(event)
        for name in list(self.prompts):
            self.engine.submit(FreeSequence(sequence_id=name))
        assert drain(self.engine) == []
        stats = self.engine.stats()
        assert (stats.num_used_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert self.engine.seconds_to_deadline() is None


EngineMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestEngineMachine = EngineMachine.TestCase
