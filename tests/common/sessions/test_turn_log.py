from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from specrag_common.runtime.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidRequest,
    NotFound,
    SessionBusy,
    SessionFull,
    TurnNotSaved,
    UpstreamUnavailable,
)
from specrag_common.sessions.lease import SessionLease, SessionLeases
from specrag_common.sessions.model import SessionInfo, SessionKey, SessionLimits
from specrag_common.sessions.redis_client import open_redis
from specrag_common.sessions.turn_log import RedisTurnLog

from tests.common.sessions.turns import KEY, add_turn, make_turn
from tests.common.sessions.valkey import reply_losing_proxy, running_valkey, slow_proxy

if TYPE_CHECKING:
    from pathlib import Path

    from redis.asyncio import Redis

pytestmark = pytest.mark.integration


async def test_turns_come_back_whole_and_in_order(log: RedisTurnLog, leases: SessionLeases) -> None:
    turns = [make_turn(f"r{number}") for number in range(3)]
    for turn in turns:
        returned = await add_turn(log, leases, KEY, turn)

    session = await log.read_session(KEY)

    assert list(session.turns) == turns
    assert session.info == returned
    assert session.info.version == session.info.num_turns == 3
    assert session.info.next_passage_number == 4
    assert session.info.collection == "handbook"
    assert session.find_turn("r1") == turns[1]
    assert session.find_turn("other") is None


async def test_fresh_session_opens_empty_and_stores_nothing(
    log: RedisTurnLog, client: Redis
) -> None:
    session = await log.open_session(KEY, collection="handbook")

    assert session.info == SessionInfo(key=KEY, collection="handbook")
    assert session.turns == ()
    assert await client.dbsize() == 0


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(KEY, tenant="rival"),
        dataclasses.replace(KEY, subject="bob"),
        dataclasses.replace(KEY, session_id="s2"),
    ],
)
async def test_session_of_another_owner_is_not_found(
    log: RedisTurnLog, leases: SessionLeases, other: SessionKey
) -> None:
    await add_turn(log, leases, KEY, make_turn())

    with pytest.raises(NotFound):
        await log.read_session(other)
    with pytest.raises(NotFound):
        await log.delete_session(other)
    assert (await log.open_session(other, collection="x")).turns == ()
    assert len((await log.read_session(KEY)).turns) == 1


def test_no_id_can_reach_into_anothers_keys() -> None:
    keys = [
        SessionKey(tenant="a", subject="b", session_id="c/d"),
        SessionKey(tenant="a", subject="b/c", session_id="d"),
        SessionKey(tenant="a/b", subject="c", session_id="d"),
        SessionKey(tenant="a", subject="b}", session_id="{c/d"),
        SessionKey(tenant="a", subject="b%2Fc", session_id="d"),
    ]

    tags = {key.hash_tag() for key in keys}

    assert len(tags) == len(keys)
    assert all(tag.count("{") == tag.count("}") == 1 for tag in tags)


@pytest.mark.parametrize(
    ("field", "value"),
    [("tenant", ""), ("session_id", ""), ("session_id", "x" * 129), ("subject", "a\n")],
)
def test_bad_ids_are_refused_by_name(field: str, value: str) -> None:
    parts = {"tenant": "a", "subject": "b", "session_id": "c", field: value}

    with pytest.raises(InvalidRequest) as caught:
        SessionKey(**parts)

    assert caught.value.violations[0].field == field


async def test_same_append_again_adds_no_second_turn(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    async with await leases.acquire(KEY) as lease:
        session = await log.open_session(KEY, collection="handbook")
        for _ in range(2):
            await log.append_turn(session.info, make_turn(), lease=lease, next_passage_number=2)

    assert len((await log.read_session(KEY)).turns) == 1


async def test_stale_version_is_not_saved(log: RedisTurnLog, leases: SessionLeases) -> None:
    async with await leases.acquire(KEY) as lease:
        before = (await log.open_session(KEY, collection="handbook")).info
        await log.append_turn(before, make_turn("r1"), lease=lease, next_passage_number=2)

        with pytest.raises(TurnNotSaved, match="changed meanwhile"):
            await log.append_turn(before, make_turn("r2"), lease=lease, next_passage_number=2)

    assert [turn.request_id for turn in (await log.read_session(KEY)).turns] == ["r1"]


async def test_holder_whose_lease_was_taken_over_cannot_write(
    log: RedisTurnLog, client: Redis
) -> None:
    hasty = SessionLeases(client, ttl_s=0.2)
    old = await hasty.acquire(KEY)
    session = await log.open_session(KEY, collection="handbook")
    stop_heartbeat(old)
    await asyncio.sleep(0.3)

    async with await hasty.acquire(KEY):
        with pytest.raises(TurnNotSaved, match="another request took over"):
            await log.append_turn(session.info, make_turn(), lease=old, next_passage_number=2)
    await old.release()

    with pytest.raises(NotFound):
        await log.read_session(KEY)


def stop_heartbeat(lease: SessionLease) -> None:
    """Make a lease lapse as if its process stood still."""
    lease._heartbeat.cancel()


async def test_deleted_session_is_not_brought_back_by_its_running_turn(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    await add_turn(log, leases, KEY, make_turn("r1"))
    async with await leases.acquire(KEY) as lease:
        session = await log.open_session(KEY, collection="handbook")
        await log.delete_session(KEY)

        with pytest.raises(TurnNotSaved):
            await log.append_turn(session.info, make_turn("r2"), lease=lease, next_passage_number=2)

    with pytest.raises(NotFound):
        await log.read_session(KEY)


async def test_session_deleted_during_its_first_turn_stays_deleted(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    async with await leases.acquire(KEY) as lease:
        session = await log.open_session(KEY, collection="handbook")
        with pytest.raises(NotFound):
            await log.delete_session(KEY)

        with pytest.raises(TurnNotSaved):
            await log.append_turn(session.info, make_turn(), lease=lease, next_passage_number=2)


async def test_racing_turns_on_one_session_save_exactly_the_holders(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    async def attempt(number: int) -> bool:
        try:
            await add_turn(log, leases, KEY, make_turn(f"r{number}"))
        except SessionBusy:
            return False
        return True

    outcomes = await asyncio.gather(*(attempt(number) for number in range(30)))

    saved = {f"r{number}" for number, is_saved in enumerate(outcomes) if is_saved}
    session = await log.read_session(KEY)
    assert {turn.request_id for turn in session.turns} == saved
    assert session.info.version == len(saved) >= 1


async def test_interleaved_sessions_leak_nothing(log: RedisTurnLog, leases: SessionLeases) -> None:
    keys = [dataclasses.replace(KEY, session_id=f"s{number}") for number in range(40)]

    async def talk(key: SessionKey) -> None:
        for number in range(3):
            turn = make_turn(f"{key.session_id}-{number}", answer_text=f"secret {key.session_id}")
            await add_turn(log, leases, key, turn)

    await asyncio.gather(*(talk(key) for key in keys))

    for key in keys:
        turns = (await log.read_session(key)).turns
        assert {turn.answer_text for turn in turns} == {f"secret {key.session_id}"}
        assert [turn.request_id for turn in turns] == [f"{key.session_id}-{n}" for n in range(3)]


async def test_full_session_is_refused_before_its_turn_begins(
    client: Redis, leases: SessionLeases
) -> None:
    by_turns = RedisTurnLog(client, limits=SessionLimits(max_turns=1))
    by_bytes = RedisTurnLog(client, limits=SessionLimits(max_session_bytes=10))
    await add_turn(by_turns, leases, KEY, make_turn())

    for log, what in ((by_turns, "1 turns, the limit is 1"), (by_bytes, "the limit is 10")):
        with pytest.raises(SessionFull, match=what):
            await log.open_session(KEY, collection="handbook")
    assert len((await by_turns.read_session(KEY)).turns) == 1


async def test_oversized_turn_is_not_saved_and_says_how_large_it_is(
    client: Redis, leases: SessionLeases
) -> None:
    log = RedisTurnLog(client, limits=SessionLimits(max_turn_bytes=1000))

    with pytest.raises(TurnNotSaved, match="the limit is 1000"):
        await add_turn(log, leases, KEY, make_turn(answer_text="x" * 1000))


async def test_session_of_another_collection_is_a_failed_precondition(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    await add_turn(log, leases, KEY, make_turn())

    with pytest.raises(FailedPrecondition, match="belongs to collection 'handbook'"):
        await log.open_session(KEY, collection="wiki")


async def test_everything_stored_expires(client: Redis, leases: SessionLeases) -> None:
    log = RedisTurnLog(client, limits=SessionLimits(ttl_s=1))
    await add_turn(log, leases, KEY, make_turn())

    for name in await client.keys("*"):
        assert await client.pttl(name) > 0, name
    await asyncio.sleep(1.1)

    with pytest.raises(NotFound):
        await log.read_session(KEY)
    assert (await log.list_sessions(tenant="acme", subject="ada")).sessions == ()


async def test_delete_leaves_nothing_but_the_fence(
    log: RedisTurnLog, leases: SessionLeases, client: Redis
) -> None:
    await add_turn(log, leases, KEY, make_turn())

    await log.delete_session(KEY)

    left = [str(name).strip("'").rpartition(":")[2] for name in await client.keys("*")]
    assert left == ["fence"]
    assert (await log.list_sessions(tenant="acme", subject="ada")).sessions == ()


async def test_list_pages_over_the_owners_sessions_last_changed_first(
    log: RedisTurnLog, leases: SessionLeases
) -> None:
    names = [f"s{number:02d}" for number in range(25)]
    for name in names:
        await add_turn(log, leases, dataclasses.replace(KEY, session_id=name), make_turn())
    for other in (dataclasses.replace(KEY, subject="bob"), dataclasses.replace(KEY, tenant="t2")):
        await add_turn(log, leases, other, make_turn())

    seen: list[str] = []
    token, num_pages = "", 0
    while True:
        page = await log.list_sessions(tenant="acme", subject="ada", page_size=10, page_token=token)
        num_pages += 1
        seen += [info.key.session_id for info in page.sessions]
        token = page.next_page_token
        if not token:
            break

    assert num_pages == 3
    assert sorted(seen) == names
    times = [
        (await log.read_session(dataclasses.replace(KEY, session_id=one))).info.updated_at
        for one in seen
    ]
    assert [int(one.timestamp() * 1000) for one in times if one] == sorted(
        (int(one.timestamp() * 1000) for one in times if one), reverse=True
    )


async def test_list_pages_through_many_sessions_of_one_millisecond(
    log: RedisTurnLog, client: Redis, leases: SessionLeases
) -> None:
    names = [f"s{number:03d}" for number in range(150)]
    for name in names:
        await add_turn(log, leases, dataclasses.replace(KEY, session_id=name), make_turn())
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    await client.zadd(f"specrag:sessions:{KEY.owner_tag()}", dict.fromkeys(names, now_ms))

    seen: list[str] = []
    token = ""
    while True:
        page = await log.list_sessions(tenant="acme", subject="ada", page_size=40, page_token=token)
        seen += [info.key.session_id for info in page.sessions]
        token = page.next_page_token
        if not token:
            break

    assert sorted(seen) == names


async def test_list_heals_entries_whose_session_is_gone(
    log: RedisTurnLog, leases: SessionLeases, client: Redis
) -> None:
    await add_turn(log, leases, KEY, make_turn())
    index = f"specrag:sessions:{KEY.owner_tag()}"
    await client.zadd(index, {"ghost": time.time() * 1000})

    page = await log.list_sessions(tenant="acme", subject="ada")

    assert [info.key for info in page.sessions] == [KEY]
    assert await client.zscore(index, "ghost") is None


@pytest.mark.parametrize("token", ["nonsense", "!!", "YWJj"])
async def test_forged_page_token_is_an_invalid_request(log: RedisTurnLog, token: str) -> None:
    with pytest.raises(InvalidRequest, match="page_token"):
        await log.list_sessions(tenant="acme", page_token=token)


@pytest.mark.parametrize("page_size", [0, -1, 201])
async def test_absurd_page_size_is_an_invalid_request(log: RedisTurnLog, page_size: int) -> None:
    with pytest.raises(InvalidRequest, match="page_size"):
        await log.list_sessions(tenant="acme", page_size=page_size)


async def test_damaged_record_is_data_loss_not_a_crash(
    log: RedisTurnLog, leases: SessionLeases, client: Redis
) -> None:
    await add_turn(log, leases, KEY, make_turn())
    await client.rpush(f"specrag:session:{KEY.hash_tag()}:turns", b'{"half": ')

    with pytest.raises(DataLoss, match="is damaged"):
        await log.read_session(KEY)


async def test_cancelled_reads_never_give_another_session_data(
    log: RedisTurnLog, leases: SessionLeases, valkey_port: int
) -> None:
    keys = [dataclasses.replace(KEY, session_id=f"s{number}") for number in range(10)]
    for key in keys:
        await add_turn(log, leases, key, make_turn(answer_text=f"secret of {key.session_id}"))
    async with slow_proxy(valkey_port, max_delay_s=0.004) as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        slow_log = RedisTurnLog(client)
        num_read = num_cancelled = 0
        for turn in range(300):
            key = keys[turn % len(keys)]
            reading = asyncio.create_task(slow_log.read_session(key))
            if turn % 3:
                await asyncio.sleep((turn % 7) * 0.001)
                reading.cancel()
            try:
                session = await reading
            except asyncio.CancelledError:
                num_cancelled += 1
                continue
            num_read += 1
            assert session.info.key == key
            assert [one.answer_text for one in session.turns] == [f"secret of {key.session_id}"]
        await client.aclose()

    assert num_cancelled > 50
    assert num_read > 100


async def test_store_that_is_down_is_unavailable_at_once(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        log, leases = RedisTurnLog(client), SessionLeases(client)
        info = await add_turn(log, leases, KEY, make_turn())
        lease = await leases.acquire(KEY)
    began = time.perf_counter()

    with pytest.raises(UpstreamUnavailable):
        await log.read_session(KEY)
    with pytest.raises(UpstreamUnavailable):
        await leases.acquire(KEY)
    with pytest.raises(UpstreamUnavailable):
        await log.list_sessions(tenant="acme")
    with pytest.raises(TurnNotSaved):
        await log.append_turn(info, make_turn("r2"), lease=lease, next_passage_number=3)
    await lease.release()
    await client.aclose()

    assert time.perf_counter() - began < 2.0


async def test_store_that_answers_nothing_is_unavailable_within_its_timeout() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = open_redis(f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        began = time.perf_counter()

        with pytest.raises(UpstreamUnavailable):
            await RedisTurnLog(client).read_session(KEY)

        assert time.perf_counter() - began < 4.5
        await client.aclose()


async def test_restarted_store_is_used_again_without_a_failed_call(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        log = RedisTurnLog(client)
        await log.open_session(KEY, collection="handbook")
    with running_valkey(tmp_path, port=port):
        assert (await log.open_session(KEY, collection="handbook")).turns == ()
    await client.aclose()


async def test_full_store_is_unavailable_not_a_crash(tmp_path: Path) -> None:
    with running_valkey(tmp_path, "--maxmemory", "3mb") as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        log, leases = RedisTurnLog(client), SessionLeases(client)
        with pytest.raises(UpstreamUnavailable):
            await fill(log, leases)
        await client.aclose()


async def fill(log: RedisTurnLog, leases: SessionLeases) -> None:
    for number in range(200):
        await add_turn(log, leases, KEY, make_turn(f"r{number}", answer_text="x" * 50_000))


async def test_append_whose_reply_was_lost_is_saved_once(
    leases: SessionLeases, log: RedisTurnLog, valkey_port: int
) -> None:
    await add_turn(log, leases, KEY, make_turn("r1"))
    async with reply_losing_proxy(valkey_port, b"lost-reply") as port:
        client = open_redis(f"redis://127.0.0.1:{port}/0")
        info = await add_turn(RedisTurnLog(client), leases, KEY, make_turn("lost-reply"))
        await client.aclose()

    session = await log.read_session(KEY)
    assert [turn.request_id for turn in session.turns] == ["r1", "lost-reply"]
    assert info.version == session.info.version == 2
