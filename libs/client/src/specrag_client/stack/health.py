"""Asking processes whether they can work."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import grpc
import redis.asyncio
import redis.exceptions
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specrag_client.stack.plan import SERVICE_NAMES, kind_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from specrag_client.stack.record import ProcessRecord

_CHECK_TIMEOUT_S: Final = 2.0
_CHANNEL_OPTIONS: Final = [("grpc.enable_http_proxy", 0)]


class Health(StrEnum):
    """What a process answered."""

    HEALTHY = "healthy"
    LOADING = "not ready"
    UNREACHABLE = "unreachable"
    STARTING = "starting"
    DEAD = "not running"


async def check_service(address: str, service: str) -> Health:
    """Ask a gRPC service by the health protocol."""
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(
                health_pb2.HealthCheckRequest(service=service), timeout=_CHECK_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as exc:
            known = exc.code() is grpc.StatusCode.NOT_FOUND
            return Health.LOADING if known else Health.UNREACHABLE
    if response.status == health_pb2.HealthCheckResponse.SERVING:
        return Health.HEALTHY
    return Health.LOADING


async def check_grpc_server(address: str) -> Health:
    """Tell whether a gRPC server without the health protocol (Milvus) takes connections."""
    async with grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS) as channel:
        try:
            await asyncio.wait_for(channel.channel_ready(), _CHECK_TIMEOUT_S)
        except TimeoutError:
            return Health.UNREACHABLE
    return Health.HEALTHY


async def check_redis(url: str) -> Health:
    """Ping a Redis.

    Raises:
        ValueError: the URL is no Redis URL.
    """
    client = redis.asyncio.Redis.from_url(
        url, socket_timeout=_CHECK_TIMEOUT_S, socket_connect_timeout=_CHECK_TIMEOUT_S
    )
    try:
        await client.ping()
    except redis.exceptions.BusyLoadingError:
        return Health.LOADING
    except (redis.exceptions.RedisError, OSError):
        return Health.UNREACHABLE
    finally:
        await client.aclose()
    return Health.HEALTHY


async def check_process(process: ProcessRecord) -> Health:
    """Tell how a process of a stack is."""
    if not process.identity.is_alive():
        return Health.DEAD
    if not process.address:
        return Health.STARTING
    if process.name == "redis":
        return await check_redis(f"redis://{process.address}")
    if process.name == "milvus":
        return await check_grpc_server(process.address)
    return await check_service(process.address, SERVICE_NAMES[kind_of(process.name)])


async def check_processes(processes: Iterable[ProcessRecord]) -> Mapping[str, Health]:
    """Ask all processes at once; answers stand by name, in the order given."""
    listed = list(processes)
    answers = await asyncio.gather(*map(check_process, listed))
    return {one.name: answer for one, answer in zip(listed, answers, strict=True)}
