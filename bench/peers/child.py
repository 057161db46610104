"""The peer's side: one JSON line in, one JSON line out.

Standard library only, because some peers live in an environment of their own. Whatever a peer
prints goes to stderr; stdout carries nothing but replies.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a peer did with one prompt.

    Attributes:
        token_ids: the answer.
        first_token_s: seconds from the request to the first token.
        decode_tokens_per_s: tokens after those that came first, over the time since then.
        total_s: seconds from the request to the last token.
        num_rounds: passes after the prompt; 0 where the peer does not say.
    """

    token_ids: list[int]
    first_token_s: float
    decode_tokens_per_s: float
    total_s: float
    num_rounds: int = 0


class Stopwatch:
    """Notes when tokens arrive."""

    def __init__(self) -> None:
        """Start now."""
        self._began = time.perf_counter()
        self._first_s = 0.0
        self._num_first = 0
        self._token_ids: list[int] = []
        self._num_arrivals = 0

    def note(self, token_ids: list[int]) -> None:
        """Take tokens that have just arrived."""
        if not token_ids:
            return
        if not self._token_ids:
            self._first_s = time.perf_counter() - self._began
            self._num_first = len(token_ids)
        self._token_ids += token_ids
        self._num_arrivals += 1

    def stop(self) -> Answer:
        """Return the answer; the last arrival is now."""
        total_s = time.perf_counter() - self._began
        num_decoded = len(self._token_ids) - self._num_first
        return Answer(
            token_ids=self._token_ids,
            first_token_s=self._first_s,
            decode_tokens_per_s=num_decoded / (total_s - self._first_s),
            total_s=total_s,
            num_rounds=self._num_arrivals,
        )


def serve(load: Callable[[], Callable[[dict[str, Any]], Answer]]) -> None:
    """Load the peer, say so, then answer requests until stdin ends.

    Args:
        load: returns what answers a request ``{"prompt_ids", "max_tokens", …}``.
    """
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        began = time.perf_counter()
        answer = load()
        _reply(replies, {"load_s": time.perf_counter() - began})
        for line in sys.stdin:
            _reply(replies, asdict(answer(json.loads(line))))


def _reply(replies: Any, record: dict[str, Any]) -> None:
    replies.write(json.dumps(record) + "\n")
    replies.flush()
