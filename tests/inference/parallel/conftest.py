"""Tiny models whose heads can be split, and engines over one rank and over several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from specrag_inference.engine import Engine
from specrag_inference.engine_config import EngineConfig
from specrag_inference.models.loading import load_model, load_tokenizer
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.plan import EnginePlan
from specrag_inference.testing import build_byte_tokenizer, build_random_model

from tests.inference.parallel.engine_links import LocalLink, ProcessLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from specrag_inference.testing import Family

NUM_KV_HEADS = 2
NUM_BLOCKS = 24
"""Of 16 tokens: four answers of 100 tokens do not fit at once."""


def save_model(folder: Path, family: Family = "llama", *, num_kv_heads: int = NUM_KV_HEADS) -> Path:
    model = build_random_model(family, seed=3, num_kv_heads=num_kv_heads)
    with quiet_transformers():
        model.module.save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
    return folder


def make_plan(folder: Path, *, tp_size: int, **changes: Any) -> EnginePlan:
    config = EngineConfig(
        num_blocks=NUM_BLOCKS, max_step_tokens=64, max_shared_prefill_tokens=32, backend="sdpa"
    )
    plain: dict[str, Any] = {"dtype": "fp32", "num_threads": 1, "engine": config}
    return EnginePlan(model=str(folder), cache_dir=folder, tp_size=tp_size, **{**plain, **changes})


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="module")
def two_ranks(model_folder: Path) -> Iterator[ProcessLink]:
    """An engine process of two ranks; its books are checked at the end."""
    link = ProcessLink(make_plan(model_folder, tp_size=2))
    yield link
    stats = link.stats()
    ranks = link.find_ranks()
    assert stats.num_free_blocks == stats.num_blocks
    assert link.stop() == 0
    assert [rank for rank in ranks if rank.is_running()] == []


@pytest.fixture
def start_engine(model_folder: Path) -> Iterator[Callable[..., ProcessLink]]:
    """Start engine processes that the test may harm."""
    links: list[ProcessLink] = []

    def start(folder: Path = model_folder, *, tp_size: int = 2, **changes: Any) -> ProcessLink:
        links.append(ProcessLink(make_plan(folder, tp_size=tp_size, **changes)))
        return links[-1]

    yield start
    for link in links:
        link.kill()


@pytest.fixture
def one_rank(model_folder: Path) -> LocalLink:
    """The same engine on one rank, in this process, with blocks enough for everybody."""
    return build_local_link(model_folder)


def build_local_link(folder: Path) -> LocalLink:
    model = load_model(str(folder), dtype="fp32", cache_dir=folder)
    config = EngineConfig(num_blocks=256, max_step_tokens=64, max_shared_prefill_tokens=32)
    return LocalLink(Engine(model, load_tokenizer(str(folder), folder), config))
