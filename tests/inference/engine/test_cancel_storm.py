"""Cancels over shared passages harm no bystander and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from specrag_inference.engine import Engine
from specrag_inference.messages import (
    FreeSequence,
    RoundVerified,
    SequenceOpened,
    TreeScored,
)
from specrag_inference.testing import drain

from tests.inference.engine.commands import (
    decode_command,
    draw_tokens,
    open_command,
    propose_command,
    score_chain_command,
    verify_command,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from specrag_inference.messages import EngineCommand, EngineEvent

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]

NUM_CANCELS = 200


class CancelStorm:
    """Victims over a shared prefix that are opened, put to work and freed at random points."""

    def __init__(self, engine: Engine, shared: tuple[int, ...], *, seed: int) -> None:
        self.engine = engine
        self.shared = shared
        self.rng = np.random.default_rng(seed)
        self.live: list[str] = []
        self.num_opened = 0
        self.num_cancelled = 0

    def stir(self) -> None:
        """Open victims, and free some."""
        while len(self.live) < 8 and self.rng.random() < 0.8:
            name = f"victim{self.num_opened}"
            self.num_opened += 1
            self.live.append(name)
            kept = int(self.rng.integers(1, len(self.shared)))
            prompt = (*self.shared[:kept], *draw_tokens(self.num_opened, 9))
            self.engine.submit(open_command(name, prompt))
        for name in list(self.live):
            if self.rng.random() < 0.25:
                self.cancel(name)

    def cancel(self, name: str) -> None:
        self.engine.submit(FreeSequence(sequence_id=name))
        self.live.remove(name)
        self.num_cancelled += 1

    def put_to_work(self, name: str) -> None:
        """Let a victim verify, decode, draft or score."""
        work: list[EngineCommand] = [
            verify_command(name, [1, 2, 3], [1, 5]),
            decode_command(name, 9),
            propose_command(name, gamma=6, num_branches=2),
            score_chain_command(name, draw_tokens(self.num_opened, 70)),
        ]
        self.engine.submit(work[int(self.rng.integers(len(work)))])


class Bystanders:
    """Sequences that decode, and one that scores the same chain again and again."""

    def __init__(self, engine: Engine, shared: tuple[int, ...]) -> None:
        self.engine = engine
        self.prompts = {f"bystander{i}": (*shared, *draw_tokens(90 + i, 3 + i)) for i in range(3)}
        self.tokens: dict[str, list[int]] = {name: [] for name in self.prompts}
        self.scores: list[NDArray[np.float32]] = []
        for name, prompt in self.prompts.items():
            engine.submit(open_command(name, prompt, max_tokens=60))
        engine.submit(open_command("scorer", shared))

    def take(self, event: EngineEvent) -> None:
        name = event.sequence_id
        if isinstance(event, RoundVerified) and name in self.prompts:
            self.tokens[name] += [token.token_id for token in event.tokens]
        elif isinstance(event, SequenceOpened) and name in self.prompts:
            self.engine.submit(decode_command(name, 60))
        elif name == "scorer":
            if isinstance(event, TreeScored):
                self.scores.append(event.logprobs)
            self.engine.submit(score_chain_command("scorer", range(100)))


@pytest.mark.parametrize("num_blocks", [128, 40])
def test_two_hundred_cancels_return_all_blocks_and_harm_no_bystander(
    build_engine: BuildEngine, generate_reference: GenerateReference, num_blocks: int
) -> None:
    shared = draw_tokens(3, 70)
    engine = build_engine(num_blocks=num_blocks)
    storm = CancelStorm(engine, shared, seed=0)
    bystanders = Bystanders(engine, shared)
    while storm.num_cancelled < NUM_CANCELS:
        storm.stir()
        for event in engine.step():
            bystanders.take(event)
            if isinstance(event, SequenceOpened) and event.sequence_id in storm.live:
                storm.put_to_work(event.sequence_id)
        engine.check_integrity()
    for name in [*storm.live, "scorer"]:
        engine.submit(FreeSequence(sequence_id=name))
    for event in drain(engine):
        bystanders.take(event)
    for name, prompt in bystanders.prompts.items():
        assert bystanders.tokens[name] == generate_reference(prompt, 60)
        engine.submit(FreeSequence(sequence_id=name))
    assert drain(engine) == []
    assert engine.stats().num_used_blocks == 0
    assert len(bystanders.scores) > 5
    for found in bystanders.scores[1:]:
        np.testing.assert_allclose(found, bystanders.scores[0], atol=1e-3)
