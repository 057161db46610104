"""The laws of one sequence, at any node of any tree behind its committed tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.sampling.history import CommittedTokens, TokenHistory
from specrag_inference.sampling.processors import LawChain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.messages import SamplingParams


class SequenceLaws:
    """A sequence's chain of processors and its committed tokens, kept together.

    Attributes:
        chain: makes laws from logits.
    """

    __slots__ = ("_committed", "chain")

    def __init__(
        self, params: SamplingParams, token_ids: Sequence[int], *, num_prompt_tokens: int
    ) -> None:
        """Watch ``token_ids``; see :class:`~specrag_inference.sampling.history.CommittedTokens`."""
        self.chain = LawChain(params)
        self._committed = CommittedTokens(token_ids, num_prompt_tokens=num_prompt_tokens)

    def get_history(self, path: Sequence[int]) -> TokenHistory:
        """Return the tokens before the one that follows ``path``."""
        return TokenHistory(committed=self._committed, path=path)
