"""Filter expressions for Milvus. Every value passes through :func:`quote`; nothing else may.

Milvus knows prepared parameters, but not every server does (Milvus Lite), so literals are
escaped here: the only special characters inside a double-quoted literal are the backslash, the
quote and line ends.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_ESCAPES: Final = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
_METADATA_KEY: Final = re.compile(r"[a-z0-9_]{1,64}")
_COLUMNS: Final = frozenset({"document_id", "title", "uri"})


class Comparison(StrEnum):
    """How a field is compared."""

    EQUALS = "equals"
    NOT_EQUALS = "not_equals"
    IN = "in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One condition of a search.

    Attributes:
        field: ``document_id``, ``title``, ``uri`` or a metadata key ([a-z0-9_], at most 64).
        comparison: how.
        values: one, or several for IN.
    """

    field: str
    comparison: Comparison
    values: tuple[str, ...]


def quote(value: str) -> str:
    """Return ``value`` as a string literal that denotes exactly it."""
    return f'"{value.translate(_ESCAPES)}"'


def is_field_name(name: str) -> bool:
    """Tell whether conditions may name this field."""
    return _METADATA_KEY.fullmatch(name) is not None


def tenant_is(tenant: str) -> str:
    """Return the condition that every search, count and delete begins with."""
    return f"tenant == {quote(tenant)}"


def one_of(column: str, values: Iterable[str]) -> str:
    """Return the condition that a column holds one of the values."""
    return f"{column} in [{', '.join(map(quote, values))}]"


def none_of(column: str, values: Iterable[str]) -> str:
    """Return the condition that a column holds none of the values."""
    return f"{column} not in [{', '.join(map(quote, values))}]"


def all_of(parts: Sequence[str]) -> str:
    """Join conditions by AND, each in parentheses of its own."""
    return " and ".join(f"({part})" for part in parts)


def condition_expression(condition: Condition) -> str:
    """Return the expression of a validated condition.

    A document without the metadata key differs from every value: it passes NOT_EQUALS.
    """
    assert is_field_name(condition.field), "conditions are validated before they get here"
    if condition.field in _COLUMNS:
        target, exists = condition.field, ""
    else:
        target = exists = f'metadata["{condition.field}"]'
    if condition.comparison is Comparison.NOT_EQUALS:
        differs = f"{target} != {quote(condition.values[0])}"
        return f"(not (exists {exists})) or ({differs})" if exists else differs
    # A chain of equalities: not every server takes `in` on a JSON path.
    return " or ".join(f"({target} == {quote(value)})" for value in condition.values)
