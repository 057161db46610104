"""Types of command line values, and the options that several commands share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from specrag_client.addresses import AddressError, parse_address

DEFAULT_DIRECTORY: Final = Path(".specrag")
MAX_TOKEN_ID: Final = 2**31 - 1

_Function = TypeVar("_Function", bound=Callable[..., Any])


class AddressType(click.ParamType[str]):
    """``HOST:PORT``."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the address as gRPC takes it."""
        try:
            return parse_address(str(value))
        except AddressError as exc:
            self.fail(str(exc), param, ctx)


class UrlType(click.ParamType[str]):
    """A URL with one of some schemes."""

    name = "url"

    def __init__(self, *schemes: str) -> None:
        """Accept these schemes."""
        self._schemes = schemes

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the URL unchanged."""
        url = str(value)
        scheme, separator, rest = url.partition("://")
        if scheme not in self._schemes or not separator or not rest:
            known = ", ".join(f"{one}://" for one in self._schemes)
            self.fail(f"{url!r} does not begin with one of {known}", param, ctx)
        return url


class TextType(click.ParamType[str]):
    """Text that can travel: valid Unicode, and not blank where that makes no sense."""

    name = "text"

    def __init__(self, *, blank: bool = False) -> None:
        """Allow blank text or not."""
        self._blank = blank

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged."""
        text = str(value)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            self.fail("it is not valid UTF-8", param, ctx)
        if not self._blank and not text.strip():
            self.fail("it is blank", param, ctx)
        return text


class FilePathType(click.Path):
    """A path; empty text, as an unset variable gives it, is none and never the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if not str(value):
            self.fail("it is empty", param, ctx)
        return super().convert(value, param, ctx)


class FiniteRange(click.FloatRange):
    """A float range that NaN is outside of."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


class TokenBiasType(click.ParamType[tuple[int, float]]):
    """``ID=VALUE``: a token id and what is added to its logit."""

    name = "id=value"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, float]:
        """Return id and value."""
        token_id, separator, bias = str(value).partition("=")
        if not (separator and token_id.isascii() and token_id.isdigit()):
            self.fail(f"{value!r} is not ID=VALUE with a token id", param, ctx)
        if int(token_id) > MAX_TOKEN_ID:
            self.fail(f"token id {token_id} is above {MAX_TOKEN_ID}", param, ctx)
        return int(token_id), FiniteRange(-100, 100).convert(bias, param, ctx)


def with_directory(command: str, directory: Path) -> str:
    """Return a command to copy, with ``--dir`` where the folder is not the default one."""
    if directory == DEFAULT_DIRECTORY:
        return command
    return f"{command} --dir {shlex.quote(str(directory))}"


def directory_option(function: _Function) -> _Function:
    """Add ``--dir``."""
    return click.option(
        "--dir",
        "directory",
        type=FilePathType(file_okay=False, path_type=Path),
        default=DEFAULT_DIRECTORY,
        show_default=True,
        help="Folder of the local stack.",
    )(function)


def target_options(function: _Function) -> _Function:
    """Add ``--dir`` and ``--endpoint``."""
    with_endpoint = click.option(
        "--endpoint", type=AddressType(), help="Orchestrator to talk to, instead of a local stack."
    )(function)
    return directory_option(with_endpoint)


def retriever_option(function: _Function) -> _Function:
    """Add ``--retriever``."""
    return click.option(
        "--retriever",
        type=AddressType(),
        help="Retriever to talk to, where --endpoint does not serve documents too.",
    )(function)


def collection_option(function: _Function) -> _Function:
    """Add ``--collection``."""
    return click.option(
        "--collection", type=TextType(), required=True, help="Name of the collection."
    )(function)


def tenant_option(function: _Function) -> _Function:
    """Add ``--tenant``."""
    return click.option(
        "--tenant",
        type=TextType(),
        default=None,
        help="Whose documents and sessions; by default the tenant 'default'.",
    )(function)


def json_option(function: _Function) -> _Function:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)
