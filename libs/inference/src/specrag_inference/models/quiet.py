"""Loads without progress bars and advice on the terminal."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers below errors while the block runs, then restore what was set."""
    verbosity = logging.get_verbosity()
    had_progress_bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_progress_bar:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
