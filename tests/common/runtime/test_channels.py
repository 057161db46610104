from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from specrag_common.runtime.channels import open_channel
from specrag_common.runtime.errors import Capacity, DeadlineExceeded, UpstreamUnavailable

from tests.common.runtime.serving import SERVICE, Running, Serve


async def start_three(serve: Serve) -> tuple[list[Running], str, Counter[int]]:
    served: Counter[int] = Counter()
    backends = []
    for number in range(3):

        async def count(_request: bytes, _context: Any, number: int = number) -> bytes:
            served[number] += 1
            return b""

        backends.append(await serve({"Count": ("unary_unary", count)}))
    ports = ",".join(f"127.0.0.1:{one.server.port}" for one in backends)
    return backends, f"ipv4:{ports}", served


async def test_calls_are_spread_evenly_over_all_backends(serve: Serve) -> None:
    _, target, served = await start_three(serve)

    async with open_channel(target, health_service=SERVICE) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Count")
        await call(b"", wait_for_ready=True)
        await asyncio.sleep(0.3)
        served.clear()
        for _ in range(90):
            await call(b"")

    assert [served[number] for number in range(3)] == [30, 30, 30]


async def test_backend_that_is_not_serving_gets_no_calls(serve: Serve) -> None:
    backends, target, served = await start_three(serve)

    async with open_channel(target, health_service=SERVICE) as channel:
        call = channel.unary_unary(f"/{SERVICE}/Count")
        await call(b"", wait_for_ready=True)
        backends[0].server.set_ready(SERVICE, ready=False)
        await asyncio.sleep(0.3)
        served.clear()
        for _ in range(30):
            await call(b"")
        backends[0].server.set_ready(SERVICE)
        await asyncio.sleep(0.3)
        after = served[0]
        for _ in range(30):
            await call(b"")

    assert after == 0
    assert served[0] == 10


@pytest.mark.parametrize(("is_idempotent", "num_attempts"), [(True, 3), (False, 1)])
async def test_only_idempotent_methods_are_retried(
    serve: Serve, is_idempotent: bool, num_attempts: int
) -> None:
    attempts = 0

    async def fail_twice(_request: bytes, _context: Any) -> bytes:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise UpstreamUnavailable("warming up")
        return b"ok"

    method = f"{SERVICE}/FailTwice"
    running = await serve(
        {"FailTwice": ("unary_unary", fail_twice)},
        idempotent_methods=[method] if is_idempotent else [],
    )

    with contextlib.suppress(UpstreamUnavailable):
        await running.call("unary_unary", "FailTwice")(b"")

    assert attempts == num_attempts


async def test_retries_end_with_the_deadline(serve: Serve) -> None:
    async def fail(_request: bytes, _context: Any) -> bytes:
        raise UpstreamUnavailable("down")

    running = await serve({"Fail": ("unary_unary", fail)}, idempotent_methods=[f"{SERVICE}/Fail"])
    began = asyncio.get_running_loop().time()

    with pytest.raises((UpstreamUnavailable, DeadlineExceeded)):
        await running.call("unary_unary", "Fail")(b"", timeout=0.15)

    assert asyncio.get_running_loop().time() - began < 0.3


async def test_message_over_the_limit_is_refused_by_either_side(serve: Serve) -> None:
    async def grow(request: bytes, _context: Any) -> bytes:
        return request * 5

    running = await serve({"Grow": ("unary_unary", grow)})
    call = running.call("unary_unary", "Grow")

    with pytest.raises(Capacity):
        await call(b"x" * (4 * 1024 * 1024 + 1))
    with pytest.raises(Capacity):
        await call(b"x" * 1024 * 1024)
    assert len(await call(b"x" * 1000)) == 5000
