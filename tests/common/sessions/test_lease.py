from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.errors import SessionBusy
from specrag_common.sessions.lease import SessionLease, SessionLeases, lease_key
from specrag_common.sessions.redis_client import open_redis

from tests.common.sessions.turns import KEY
from tests.common.sessions.valkey import reply_losing_proxy, running_valkey

if TYPE_CHECKING:
    from pathlib import Path

    from redis.asyncio import Redis

pytestmark = pytest.mark.integration


async def test_second_turn_meanwhile_is_busy_with_a_retry_hint(leases: SessionLeases) -> None:
    async with await leases.acquire(KEY):
        with pytest.raises(SessionBusy) as caught:
            await leases.acquire(KEY)

    assert caught.value.retryable
    assert caught.value.retry_delay_s == 1.0
    await (await leases.acquire(KEY)).release()


async def test_leases_of_other_sessions_do_not_interfere(leases: SessionLeases) -> None:
    async with (
        await leases.acquire(KEY),
        await leases.acquire(dataclasses.replace(KEY, session_id="s2")),
        await leases.acquire(dataclasses.replace(KEY, tenant="t2")),
    ):
        pass


async def test_one_of_many_gets_the_lease(leases: SessionLeases) -> None:
    outcomes = await asyncio.gather(
        *(leases.acquire(KEY) for _ in range(50)), return_exceptions=True
    )

    held = [one for one in outcomes if isinstance(one, SessionLease)]
    assert len(held) == 1
    assert sum(isinstance(one, SessionBusy) for one in outcomes) == 49
    await held[0].release()


async def test_tokens_rise_also_after_the_store_forgot_everything(
    leases: SessionLeases, client: Redis
) -> None:
    tokens = []
    for _ in range(5):
        async with await leases.acquire(KEY) as lease:
            tokens.append(lease.token)
        await client.flushall()

    assert tokens == sorted(set(tokens))


async def test_heartbeat_keeps_a_lease_beyond_its_time(client: Redis) -> None:
    leases = SessionLeases(client, ttl_s=0.3)
    async with await leases.acquire(KEY) as lease:
        await asyncio.sleep(1.0)

        assert not lease.is_lost
        lease.raise_if_lost()
        with pytest.raises(SessionBusy):
            await leases.acquire(KEY)


async def test_lost_lease_is_noticed_and_not_released_over_its_successor(client: Redis) -> None:
    leases = SessionLeases(client, ttl_s=0.3)
    lease = await leases.acquire(KEY)
    await client.set(lease_key(KEY), "9:somebody")

    async with asyncio.timeout(1):
        await lease.wait_lost()
    with pytest.raises(SessionBusy, match="taken over"):
        lease.raise_if_lost()
    await lease.release()

    assert await client.get(lease_key(KEY)) == b"9:somebody"


async def test_lease_is_lost_when_the_store_is_gone_for_its_whole_time(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        lease = await SessionLeases(client, ttl_s=0.6).acquire(KEY)
    began = asyncio.get_running_loop().time()

    await lease.wait_lost()

    assert asyncio.get_running_loop().time() - began < 0.9
    await lease.release()
    await client.aclose()


async def test_cancelled_turn_gives_its_lease_back(leases: SessionLeases, client: Redis) -> None:
    async def turn() -> None:
        async with await leases.acquire(KEY):
            await asyncio.sleep(60)

    running = asyncio.create_task(turn())
    await asyncio.sleep(0.05)
    assert await client.exists(lease_key(KEY))

    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.sleep(0.05)

    assert not await client.exists(lease_key(KEY))


async def test_acquisition_whose_reply_was_lost_finds_its_own_lease(
    client: Redis, leases: SessionLeases, valkey_port: int
) -> None:
    await client.script_flush()
    await (await leases.acquire(KEY)).release()
    async with reply_losing_proxy(valkey_port, lease_key(KEY).encode()) as port:
        unlucky = open_redis(f"redis://127.0.0.1:{port}/0")
        async with await SessionLeases(unlucky).acquire(KEY) as lease:
            held = await client.get(lease_key(KEY))
            assert str(held).startswith(f"b'{lease.token}:")
        await unlucky.aclose()
