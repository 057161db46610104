"""Where an answer ends: stop tokens, stop strings, length and context.

Ends are looked for token by token, whatever the batches are, so that an earlier stop beats a later
cap and a stop in the middle of an accepted batch is found. A stop inside a token keeps that token
(ids and usage include it) while the text ends at the match.

While an answer is shorter than ``min_tokens`` no stop string can match: one counts only where it
begins behind the text that those tokens decide. End-of-answer tokens need no care here, since the
law rules them out until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specrag_common.text.detokenizer import IncrementalDetokenizer
from specrag_common.text.stops import StopMatcher

from specrag_inference.messages import FinishReason, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class EndDecision:
    """What remains of a batch of new tokens.

    Attributes:
        num_kept: leading tokens of the batch that belong to the answer.
        finish_reason: set when the answer ends with the last kept token.
        stop_text_length: code points of the whole answer's text that are kept, when a stop string
            ended it.
    """

    num_kept: int
    finish_reason: FinishReason | None = None
    stop_text_length: int | None = None


class AnswerEnds:
    """Watches one answer grow; fed with committed tokens only."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        tokenizer: Tokenizer | None = None,
        max_context_tokens: int | None = None,
    ) -> None:
        """Watch for the ends in ``params``.

        Args:
            params: stop token ids, stop strings, max_tokens and min_tokens.
            tokenizer: needed when there are stop strings; otherwise no text is made.
            max_context_tokens: answer tokens the context has room for; ``None`` = no limit.

        Raises:
            ValueError: stop strings without a tokenizer, or an empty stop string.
        """
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer to be found in tokens")
        self._params = params
        self._max_context_tokens = max_context_tokens
        self._num_tokens = 0
        self._finished = False
        self._stops = StopMatcher(params.stop)
        self._detokenizer = (
            IncrementalDetokenizer(tokenizer) if tokenizer is not None and params.stop else None
        )
        self._tail = ""
        self._tail_start = 0

    def advance(self, token_ids: Sequence[int]) -> EndDecision:
        """Take new tokens, up to the answer's end if it is among them.

        Raises:
            ValueError: the answer has ended already.
        """
        if self._finished:
            raise ValueError(f"the answer ended after {self._num_tokens} tokens")
        for idx, token_id in enumerate(token_ids):
            end = self._take(token_id)
            if end is not None:
                self._finished = True
                reason, stop_text_length = end
                return EndDecision(
                    num_kept=idx + 1, finish_reason=reason, stop_text_length=stop_text_length
                )
        return EndDecision(num_kept=len(token_ids))

    def _take(self, token_id: int) -> tuple[FinishReason, int | None] | None:
        """Append one token; return the reason and the text length when it ends the answer."""
        self._num_tokens += 1
        if token_id in self._params.stop_token_ids:
            return FinishReason.STOP_TOKEN, None
        stop_text_length = self._find_stop(token_id)
        if stop_text_length is not None:
            return FinishReason.STOP_STRING, stop_text_length
        if self._num_tokens >= self._params.max_tokens:
            return FinishReason.LENGTH, None
        if self._max_context_tokens is not None and self._num_tokens >= self._max_context_tokens:
            return FinishReason.CONTEXT, None
        return None

    def _find_stop(self, token_id: int) -> int | None:
        """Append the token's text; return the answer's text length before a stop string."""
        if self._detokenizer is None:
            return None
        self._tail += self._detokenizer.push([token_id])
        if self._num_tokens <= self._params.min_tokens:
            self._drop_tail(len(self._tail))
            return None
        match = self._stops.find(self._tail)
        if match is not None:
            return self._tail_start + match.start
        self._drop_tail(max(0, len(self._tail) - (self._stops.max_length - 1)))
        return None

    def _drop_tail(self, num_chars: int) -> None:
        """Forget text in which no stop string can begin any more."""
        self._tail = self._tail[num_chars:]
        self._tail_start += num_chars
