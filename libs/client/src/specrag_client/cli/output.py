"""Writing JSON to stdout."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from typing import TextIO

_LINE_SEPARATORS: Final = str.maketrans(
    {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
)


def print_json(value: Any, stdout: TextIO, *, indent: int | None = None) -> None:
    """Write a value as JSON and flush.

    Characters the stream's encoding may not know are escaped, and so are those that some readers
    take for the end of a line: a JSON line stays one line to everybody.
    """
    unicode = (stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, ensure_ascii=not unicode, indent=indent)
    stdout.write(text.translate(_LINE_SEPARATORS) + "\n")
    stdout.flush()
