"""Which answers a replica is working on."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from specrag_common.runtime.errors import AlreadyExists

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator


class LiveAnswers:
    """Refuses a second stream of an answer that is live here."""

    def __init__(self) -> None:
        self._claimed: set[Hashable] = set()

    @contextmanager
    def claim(self, key: Hashable, what: str) -> Iterator[None]:
        """Hold ``key`` while the block runs.

        Args:
            key: the answer, with the drafter's index where there are several.
            what: the key in words, for the error.

        Raises:
            AlreadyExists: another stream holds it.
        """
        if key in self._claimed:
            raise AlreadyExists(
                f"{what} is live on this replica; use an id of your own for every answer",
                reason="ANSWER_IS_LIVE",
            )
        self._claimed.add(key)
        try:
            yield
        finally:
            self._claimed.discard(key)
