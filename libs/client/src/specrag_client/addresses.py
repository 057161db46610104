"""Addresses of services as people write them."""

from __future__ import annotations


class AddressError(ValueError):
    """The text is no ``HOST:PORT``."""


def parse_address(text: str) -> str:
    """Return ``HOST:PORT`` as gRPC takes it.

    A leading ``http://`` is not accepted: gRPC addresses have no scheme. IPv6 hosts stand in
    brackets.

    Raises:
        AddressError: host or port is missing, or the port is not 1 to 65535.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or "/" in text:
        raise AddressError(f"{text!r} is not HOST:PORT, for example 127.0.0.1:50051")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise AddressError(f"{text!r}: write an IPv6 host in brackets, for example [::1]:50051")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise AddressError(f"{text!r}: the port must be a number from 1 to 65535")
    return f"{host}:{int(port)}"
