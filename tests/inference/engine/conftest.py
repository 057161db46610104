"""A tiny model, and engines over it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.testing import BYTE_VOCAB_SIZE, build_byte_tokenizer, build_random_model

if TYPE_CHECKING:
    from specrag_inference.models.loading import LoadedModel

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]

PADDING_IDS = [*range(BYTE_VOCAB_SIZE, BYTE_VOCAB_SIZE + 5)]


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    return build_random_model("llama", seed=0)


@pytest.fixture
def build_engine(tiny_model: LoadedModel) -> Iterator[BuildEngine]:
    """Build an engine with small sizes; at the test's end its books are checked."""
    engines: list[Engine] = []

    def build(model: LoadedModel = tiny_model, **sizes: Any) -> Engine:
        defaults = {"num_blocks": 128, "max_step_tokens": 64, "max_shared_prefill_tokens": 32}
        config = EngineConfig(**{**defaults, **sizes})
        engines.append(Engine(model, build_byte_tokenizer(), config))
        return engines[-1]

    yield build
    for engine in engines:
        engine.check_integrity()
        engine.close()
        assert engine.stats().num_free_blocks == engine.config.num_blocks


@pytest.fixture(scope="session")
def generate_reference(tiny_model: LoadedModel) -> GenerateReference:
    """Greedy decoding by transformers' own generate(), padding ids masked."""
    module = copy.deepcopy(tiny_model.module)
    module.set_attn_implementation("eager")

    def generate(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        output = module.generate(  # type: ignore[operator]  # untyped in transformers
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            suppress_tokens=PADDING_IDS,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    return generate
