"""Writing JSON to stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import TextIO


def print_json(value: Any, stdout: TextIO, *, indent: int | None = None) -> None:
    """Write a value as JSON and flush; escapes what the stream's encoding may not know."""
    unicode = (stdout.encoding or "").lower().replace("-", "") == "utf8"
    stdout.write(json.dumps(value, ensure_ascii=not unicode, indent=indent) + "\n")
    stdout.flush()
