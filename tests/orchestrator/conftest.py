"""Logs reach pytest; a real Valkey for the tests that need one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import structlog
from specrag_common.runtime.logs import route_through_standard_logging
from specrag_common.sessions.redis_client import open_redis

from tests.common.sessions.valkey import running_valkey

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def logs_reach_pytest() -> Iterator[None]:
    route_through_standard_logging("orchestrator-under-test")
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as port:
        yield port


@pytest.fixture
async def redis_url(valkey_port: int) -> str:
    """The URL of an empty store."""
    url = f"redis://127.0.0.1:{valkey_port}/0"
    client = open_redis(url)
    await client.flushall()
    await client.aclose()
    return url
