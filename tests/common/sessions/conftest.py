"""One real Valkey for all tests of this folder, emptied before each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from specrag_common.sessions.lease import SessionLeases
from specrag_common.sessions.redis_client import open_redis
from specrag_common.sessions.turn_log import RedisTurnLog

from tests.common.sessions.valkey import running_valkey

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from redis.asyncio import Redis


@pytest.fixture(scope="session")
def valkey_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as port:
        yield port


@pytest.fixture
async def client(valkey_port: int) -> AsyncIterator[Redis]:
    opened = open_redis(f"redis://127.0.0.1:{valkey_port}/0")
    await opened.flushall()
    yield opened
    await opened.aclose()


@pytest.fixture
def leases(client: Redis) -> SessionLeases:
    return SessionLeases(client)


@pytest.fixture
def log(client: Redis) -> RedisTurnLog:
    return RedisTurnLog(client)
