"""What a measurement leaves behind: rows with their bars, as one JSON file.

Every bench takes ``--out FILE`` and writes a :class:`BenchResult` there; ``python -m bench.core``
reads the files and prints one table.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """One figure.

    Attributes:
        what: what was measured, in words.
        value: the figure; a string where it is none (an interval, a list of names).
        unit: of the value; empty for counts and ratios.
        bar: what is asked for, in words; empty for a figure without one.
        holds: whether the bar is reached; ``None`` without a bar.
    """

    what: str
    value: float | str
    unit: str = ""
    bar: str = ""
    holds: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """All figures of one measurement.

    Attributes:
        name: of the bench module, such as ``peers``.
        rows: in the order to be printed.
        command: what was run.
        conditions: model, precision, threads, repeats: whatever the figures depend on.
    """

    name: str
    rows: tuple[ResultRow, ...]
    command: str
    conditions: str

    @property
    def holds(self) -> bool:
        """Whether no bar was missed."""
        return all(row.holds is not False for row in self.rows)


def at_least(what: str, value: float, bar: float, unit: str = "", *, bar_of: str = "") -> ResultRow:
    """Return a row whose value must not be below ``bar``; ``bar_of`` says what the bar is of."""
    return ResultRow(
        what=what,
        value=value,
        unit=unit,
        bar=f">= {bar:g} {bar_of}".strip(),
        holds=value >= bar,
    )


def at_most(what: str, value: float, bar: float, unit: str = "", *, bar_of: str = "") -> ResultRow:
    """Return a row whose value must not be above ``bar``; ``bar_of`` says what the bar is of."""
    return ResultRow(
        what=what,
        value=value,
        unit=unit,
        bar=f"<= {bar:g} {bar_of}".strip(),
        holds=value <= bar,
    )


def describe_command(module: str) -> str:
    """Return the command line of this run, as it can be typed again."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def describe_machine() -> str:
    """Return processor architecture, cores, load and day, for a result's conditions."""
    load = os.getloadavg()[0]
    day = time.strftime("%Y-%m-%d")
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}, {day}"


def write_result(path: Path, result: BenchResult) -> None:
    """Write the result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1) + "\n", encoding="utf-8")


def read_result(path: Path) -> BenchResult:
    """Read what :func:`write_result` wrote.

    Raises:
        ValueError: the file is no result.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows = tuple(ResultRow(**row) for row in record.pop("rows"))
        return BenchResult(rows=rows, **record)
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no result of a bench: {error}") from error


def format_rows(rows: Sequence[ResultRow]) -> str:
    """Return the rows as aligned text: what, value, bar, verdict."""
    width = max((len(row.what) for row in rows), default=0)
    return "\n".join(_format_row(row, width) for row in rows)


def format_value(row: ResultRow) -> str:
    """Return the value with its unit, floats to four significant digits."""
    text = row.value if isinstance(row.value, str) else f"{row.value:.4g}"
    return f"{text} {row.unit}".strip()


def _format_row(row: ResultRow, width: int) -> str:
    verdict = {True: "holds", False: "MISSED", None: ""}[row.holds]
    return f"{row.what:{width}}  {format_value(row):>18}  {row.bar:24} {verdict}".rstrip()
