"""One real drafter with a tiny model for each test module, engine process included."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from specrag.v1 import drafter_pb2_grpc
from specrag_drafter.hosting import start_drafter
from specrag_drafter.settings import DrafterSettings
from specrag_inference.prompts import ChatTokenizer
from specrag_serving.testing import Started, running, save_sharp_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("draft"), seed=1, sharpness=2.0)


@pytest.fixture(scope="session")
def tokenizer(draft_folder: Path) -> ChatTokenizer:
    return ChatTokenizer.from_folder(draft_folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafter(draft_folder: Path) -> AsyncIterator[Started]:
    settings = DrafterSettings(
        model=str(draft_folder),
        dtype="float32",
        num_threads=1,
        kv_cache_mib=8,
        drain_notice_s=0.0,
    )
    async with running(functools.partial(start_drafter, settings)) as started:
        yield started


@pytest.fixture
def stub(drafter: Started) -> drafter_pb2_grpc.DrafterServiceAsyncStub:
    return drafter_pb2_grpc.DrafterServiceStub(drafter.channel)
