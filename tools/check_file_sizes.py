"""Fail when a hand-written Python file is longer than the project allows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

MAX_SOURCE_LINES = 500
MAX_TEST_LINES = 800


def too_long(path: Path) -> str | None:
    """Return a complaint about ``path``, or ``None`` when it is short enough."""
    limit = MAX_TEST_LINES if "tests" in path.parts else MAX_SOURCE_LINES
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    return f"{path}: {num_lines} lines exceed {limit}" if num_lines > limit else None


def main() -> None:
    """Check every tracked Python file that is not generated."""
    listing = subprocess.run(
        ["git", "ls-files", "*.py"], check=True, capture_output=True, text=True
    ).stdout
    paths = [Path(line) for line in listing.splitlines() if "_pb2" not in line]
    complaints = [text for path in paths if path.exists() and (text := too_long(path))]
    if complaints:
        sys.exit("\n".join(complaints))


if __name__ == "__main__":
    main()
