"""The one way to open a channel to a service."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import grpc
from opentelemetry import trace

from specrag_common.runtime.client_calls import ServiceChannel
from specrag_common.runtime.telemetry import TRACER_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_RECEIVE_BYTES: Final = 4 * 1024 * 1024
"""Largest message either side takes; larger ones end RESOURCE_EXHAUSTED."""

KEEPALIVE_TIME_MS: Final = 20_000
KEEPALIVE_TIMEOUT_MS: Final = 10_000

_RETRY_POLICY: Final = {
    "maxAttempts": 4,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}


def open_channel(
    target: str,
    *,
    health_service: str | None = None,
    idempotent_methods: Sequence[str] = (),
    unary_timeout_s: float = 30.0,
    stream_timeout_s: float = 600.0,
    tracer: trace.Tracer | None = None,
) -> ServiceChannel:
    """Open a channel that balances over all addresses of ``target``.

    Args:
        target: ``host:port``, ``dns:///name:port`` or ``ipv4:a:p,b:p``.
        health_service: backends whose health flag of this name is not SERVING get no calls.
        idempotent_methods: ``package.Service/Method`` names that are retried on UNAVAILABLE with
            jittered back-off inside the deadline, as long as no response has arrived.
        unary_timeout_s: timeout of calls with one request and one response that state none.
        stream_timeout_s: the same for calls with a stream.
        tracer: records client spans; the process's global provider when absent.
    """
    channel = grpc.aio.insecure_channel(
        target, options=channel_options(health_service, idempotent_methods)
    )
    return ServiceChannel(
        channel,
        unary_timeout_s=unary_timeout_s,
        stream_timeout_s=stream_timeout_s,
        tracer=tracer or trace.get_tracer(TRACER_NAME),
    )


def channel_options(
    health_service: str | None = None, idempotent_methods: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """Return the channel arguments; for channels with credentials of their own."""
    return [
        ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 3_000),
        ("grpc.dns_min_time_between_resolutions_ms", 5_000),
        ("grpc.service_config", json.dumps(_service_config(health_service, idempotent_methods))),
    ]


def _service_config(
    health_service: str | None, idempotent_methods: Sequence[str]
) -> dict[str, Any]:
    config: dict[str, Any] = {"loadBalancingConfig": [{"round_robin": {}}]}
    if health_service is not None:
        config["healthCheckConfig"] = {"serviceName": health_service}
    if idempotent_methods:
        names = [name.strip("/").rsplit("/", 1) for name in idempotent_methods]
        config["methodConfig"] = [
            {
                "name": [{"service": service, "method": method} for service, method in names],
                "retryPolicy": _RETRY_POLICY,
            }
        ]
    return config
