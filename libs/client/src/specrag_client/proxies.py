"""Keeping HTTP proxies out of connections to this machine.

gRPC sends even loopback connections to the proxy of ``http_proxy``, unless ``no_grpc_proxy`` or
``no_proxy`` names the host; the first of the two that is set counts alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_VARIABLE: Final = "no_grpc_proxy"
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def loopback_exemption(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that exempts loopback beside all that is exempt already."""
    exempt = environment.get(_VARIABLE) or environment.get("no_proxy") or ""
    hosts = [host.strip() for host in exempt.split(",") if host.strip()]
    return {_VARIABLE: ",".join(dict.fromkeys((*hosts, *_LOOPBACK)))}
