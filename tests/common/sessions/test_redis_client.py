from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.errors import FailedPrecondition
from specrag_common.sessions.redis_client import MAX_CONNECTIONS, open_redis

if TYPE_CHECKING:
    from redis.asyncio import Redis


@pytest.mark.parametrize("url", ["localhost:6379", "http://secret@host", "redis://host:no/0"])
def test_bad_url_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        open_redis(url)

    assert url not in caught.value.message


def test_client_is_made_without_a_running_loop() -> None:
    assert open_redis("redis://127.0.0.1:1/0") is not None


@pytest.mark.integration
async def test_cancelled_commands_leak_no_connections(client: Redis) -> None:
    for _ in range(3 * MAX_CONNECTIONS):
        waiting = asyncio.ensure_future(client.get("x"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})

    assert await asyncio.gather(*(client.get("x") for _ in range(50))) == [None] * 50
