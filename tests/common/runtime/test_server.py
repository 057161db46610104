from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from specrag_common.runtime.errors import FailedPrecondition, NotFound, SpecragError
from specrag_common.runtime.server import GrpcServer
from specrag_common.runtime.settings import ServiceSettings

from tests.common.runtime.serving import SERVICE, Running, Serve, add_behaviours

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from specrag_common.runtime.client_calls import ServiceChannel


async def slow_stream(request: bytes, _context: Any) -> AsyncIterator[bytes]:
    for byte in request:
        yield bytes([byte])
        await asyncio.sleep(0.1)


def raw_method(channel: grpc.aio.Channel, name: str) -> Any:
    return channel.unary_stream(f"/{SERVICE}/{name}")


async def check(channel: ServiceChannel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    return int(answer.status)


async def test_health_tells_the_process_from_its_services(serve: Serve) -> None:
    running = await serve({})
    running.server.set_ready(SERVICE, ready=False)
    serving = health_pb2.HealthCheckResponse.SERVING

    assert await check(running.channel, "") == serving
    assert await check(running.channel, SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
    running.server.set_ready(SERVICE)
    assert await check(running.channel, SERVICE) == serving
    with pytest.raises(NotFound):
        await check(running.channel, "no.such.Service")


async def test_health_watch_sends_each_change_once(serve: Serve) -> None:
    running = await serve({})
    stub = health_pb2_grpc.HealthStub(running.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
    seen = [(await watch.read()).status]
    for ready in (True, False, False, True):
        running.server.set_ready(SERVICE, ready=ready)
        await asyncio.sleep(0.02)
    seen += [(await watch.read()).status for _ in range(2)]

    assert seen == [1, 2, 1]


async def test_health_list_names_all_services(serve: Serve) -> None:
    running = await serve({})
    stub = health_pb2_grpc.HealthStub(running.channel)

    answer = await stub.List(health_pb2.HealthListRequest())

    assert set(answer.statuses) == {"", SERVICE}


async def test_reflection_lists_the_services(serve: Serve) -> None:
    running = await serve({})
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))

    answer = await call.read()
    await call.done_writing()

    names = {one.name for one in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health"} <= names


async def test_bound_port_is_written_to_the_port_file(tmp_path: Path) -> None:
    port_file = tmp_path / "run" / "port"
    settings = ServiceSettings(port_file=port_file, drain_notice_s=0.0)

    async with GrpcServer(settings, services=[]) as server:
        assert int(port_file.read_text()) == server.port > 0

    assert list(port_file.parent.iterdir()) == [port_file]


async def test_taken_port_is_a_typed_error_naming_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GrpcServer(ServiceSettings(port=port, drain_notice_s=0.0), services=[])

        with pytest.raises(FailedPrecondition, match=f"cannot listen on 127.0.0.1:{port}"):
            await server.start()


async def test_drain_lets_a_running_stream_finish_and_refuses_new_calls(serve: Serve) -> None:
    running = await serve({"Slow": ("unary_stream", slow_stream)})
    stream = running.call("unary_stream", "Slow")(b"abcde")
    first = await stream.read()

    draining = asyncio.create_task(running.server.drain())
    await asyncio.sleep(0.05)
    with pytest.raises(SpecragError):
        await running.call("unary_stream", "Slow")(b"abc", timeout=1.0).read()
    rest = [one async for one in stream]
    await draining

    assert first + b"".join(rest) == b"abcde"
    assert await stream.code() is grpc.StatusCode.OK


async def test_drain_does_not_wait_for_health_watches_or_reflection(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    running = await serve({}, health_service=SERVICE)
    watch = health_pb2_grpc.HealthStub(running.channel).Watch(
        health_pb2.HealthCheckRequest(service=SERVICE)
    )
    await watch.read()
    info = reflection_pb2_grpc.ServerReflectionStub(running.channel).ServerReflectionInfo()
    await info.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    await info.read()
    began = asyncio.get_running_loop().time()

    with caplog.at_level(logging.WARNING):
        await running.server.drain()

    assert asyncio.get_running_loop().time() - began < 2.0
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert caplog.records == []


async def test_drain_cancels_what_outlives_the_grace() -> None:
    closed = asyncio.Event()

    async def endless(_request: bytes, _context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    settings = ServiceSettings(drain_notice_s=0.0, drain_grace_s=0.2)
    server = GrpcServer(settings, services=[SERVICE])
    add_behaviours(server.grpc, {"Endless": ("unary_stream", endless)})
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        call = raw_method(channel, "Endless")(b"")
        await call.read()
        began = asyncio.get_running_loop().time()

        await server.drain()

    assert asyncio.get_running_loop().time() - began < 1.0
    assert closed.is_set()


async def test_client_still_sees_the_status_of_a_handler_that_fails_during_a_drain(
    serve: Serve,
) -> None:
    async def fail_slowly(_request: bytes, _context: Any) -> bytes:
        await asyncio.sleep(0.3)
        raise NotFound("gone for good")

    running = await serve({"Fail": ("unary_unary", fail_slowly)})
    call = asyncio.ensure_future(wait_for(running, "Fail"))
    await asyncio.sleep(0.1)

    await running.server.drain()

    with pytest.raises(NotFound, match="gone for good"):
        await call


async def wait_for(running: Running, method: str) -> bytes:
    answer: bytes = await running.call("unary_unary", method)(b"")
    return answer


async def test_servers_start_and_stop_many_times_in_one_loop() -> None:
    settings = ServiceSettings(drain_notice_s=0.0)
    async with asyncio.timeout(4):
        for _ in range(30):
            async with GrpcServer(settings, services=[SERVICE]):
                pass


@pytest.mark.slow
async def test_client_that_pings_every_ten_seconds_is_not_sent_away(serve: Serve) -> None:
    running = await serve({"Slow": ("unary_stream", slow_stream)})
    options = [
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    target = f"127.0.0.1:{running.server.port}"
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        await channel.channel_ready()
        lost = asyncio.ensure_future(channel.wait_for_state_change(grpc.ChannelConnectivity.READY))
        await asyncio.wait({lost}, timeout=45)
        assert not lost.done()
        lost.cancel()
        assert await raw_method(channel, "Slow")(b"a").read() == b"a"
