"""One real verifier with a tiny model for each test module, engine process included."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from specrag.v1 import verifier_pb2_grpc
from specrag_serving.testing import Started, running, save_sharp_model
from specrag_verifier.hosting import start_verifier
from specrag_verifier.settings import VerifierSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("target"), seed=1, sharpness=2.0)


def make_settings(target_folder: Path) -> VerifierSettings:
    return VerifierSettings(
        model=str(target_folder),
        dtype="float32",
        num_threads=1,
        kv_cache_mib=8,
        drain_notice_s=0.0,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def verifier(target_folder: Path) -> AsyncIterator[Started]:
    async with running(functools.partial(start_verifier, make_settings(target_folder))) as started:
        yield started


@pytest.fixture
def stub(verifier: Started) -> verifier_pb2_grpc.VerifierServiceAsyncStub:
    return verifier_pb2_grpc.VerifierServiceStub(verifier.channel)
