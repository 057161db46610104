"""The one place that reads the environment.

Each service subclasses :class:`ServiceSettings` with its own prefix ``SPECRAG_<SERVICE>_`` and
calls :func:`load_settings` once, in its ``__main__``; everything else gets plain values.
"""

from __future__ import annotations

import difflib
import os
import sys
from enum import StrEnum
from pathlib import Path  # noqa: TC003 - pydantic resolves it
from typing import Any, ClassVar, Final, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

_SERVICE_PREFIXES: Final = tuple(
    f"SPECRAG_{service}_" for service in ("RETRIEVER", "DRAFTER", "VERIFIER", "ORCHESTRATOR")
)


class LogFormat(StrEnum):
    """How log lines look."""

    JSON = "json"
    CONSOLE = "console"
    AUTO = "auto"


class LogLevel(StrEnum):
    """Least severe level that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class SettingsError(Exception):
    """The environment holds values that no settings can be built from; ``str`` is one line."""


class ServiceSettings(BaseSettings):
    """Settings every service has. Subclasses set ``env_prefix`` and add their own fields."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="SPECRAG_", hide_input_in_errors=False
    )

    host: str = "127.0.0.1"
    """Address the gRPC server binds; containers set ``0.0.0.0``."""

    port: int = Field(default=0, ge=0, le=65535)
    """TCP port of the gRPC server; 0 takes any free one."""

    port_file: Path | None = None
    """File that receives the bound port as text, written whole once the server listens."""

    log_level: LogLevel = LogLevel.INFO
    """Least severe level that is written."""

    log_format: LogFormat = LogFormat.AUTO
    """``json``, ``console``, or ``auto``: console when stderr is a terminal, else JSON."""

    trace_file: Path | None = None
    """File that finished spans are appended to, one JSON object a line."""

    trace_console: bool = False
    """Write finished spans to stderr too."""

    drain_notice_s: float = Field(default=0.5, ge=0, le=300)
    """Seconds between NOT_SERVING and refusing calls, for load balancers to notice."""

    drain_grace_s: float = Field(default=30.0, ge=0, le=3600)
    """Longest time running calls get to finish after a SIGTERM before they are cancelled."""


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def read_settings(cls: type[SettingsT]) -> SettingsT:
    """Build settings from the environment.

    Raises:
        SettingsError: a value is bad, or a variable looks like a misspelt setting.
    """
    _refuse_unknown_variables(cls, os.environ)  # noqa: TID251 - the one module that may
    try:
        return cls()
    except ValidationError as exc:
        raise SettingsError(_describe(cls, exc)) from exc


def load_settings(cls: type[SettingsT]) -> SettingsT:
    """Build settings from the environment, or print one line on stderr and exit with code 2."""
    try:
        return read_settings(cls)
    except SettingsError as exc:
        sys.stderr.write(f"error: {exc}\n")
        raise SystemExit(2) from None


def _prefix(cls: type[ServiceSettings]) -> str:
    return str(cls.model_config.get("env_prefix", "")).upper()


def _refuse_unknown_variables(cls: type[ServiceSettings], environment: Any) -> None:
    """Refuse variables with this service's prefix, or a slip of it, that are no setting."""
    prefix = _prefix(cls)
    known = [prefix + name.upper() for name in cls.model_fields]
    for variable in sorted(environment):
        name = variable.upper()
        if name in known:
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        if name.startswith(prefix):
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
            raise SettingsError(f"unknown setting {variable}; {hint}")
        if _is_slip_of_prefix(name) and difflib.get_close_matches(name, known, 1, 0.9):
            raise SettingsError(f"unknown setting {variable}; did you mean {close[0]}?")


def _is_slip_of_prefix(name: str) -> bool:
    """Tell a misspelt prefix from another service's variable in a shared environment."""
    return name.startswith("SPECRAG_") and not name.startswith(_SERVICE_PREFIXES)


def _describe(cls: type[ServiceSettings], exc: ValidationError) -> str:
    prefix = _prefix(cls)
    parts = []
    for fault in exc.errors(include_url=False):
        where = prefix + "_".join(str(step) for step in fault["loc"]).upper()
        message = str(fault["msg"]).removeprefix("Value error, ")
        is_missing = fault["type"] == "missing"
        parts.append(
            f"{where} is not set" if is_missing else f"{where}={fault['input']!r}: {message}"
        )
    return "; ".join(parts)
