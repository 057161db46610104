"""Where a walk gets the target's processed law at a node from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from specrag_inference.sampling.processors import NO_HISTORY, TokenHistory, compute_law

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from specrag_inference.messages import SamplingParams


class TargetLaws(Protocol):
    """The target's law after all processors, asked for only at nodes the walk visits."""

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Return the law of the token that follows a node.

        Args:
            node_idx: a node of the tree, or ``ROOT`` for the last committed token.
            path: token ids from the first level down to the node; empty at ``ROOT``.

        Returns:
            [vocab_size] float32 or float64, non-negative, sums to 1. The walk does not mutate it.
        """
        ...


class LogitsTargetLaws:
    """Laws made on demand from the logits of one verification pass."""

    __slots__ = ("_history", "_logits", "_params")

    def __init__(
        self,
        logits: NDArray[np.float32],
        params: SamplingParams,
        history: TokenHistory = NO_HISTORY,
    ) -> None:
        """Wrap the logits of a tree.

        Args:
            logits: [num_nodes + 1, vocab_size] float32, padding ids cut off. Row 0 belongs to the
                last committed token, row ``i + 1`` to node ``i``.
            params: the processors' parameters.
            history: prompt and committed answer tokens, for history-dependent processors.
        """
        self._logits = logits
        self._params = params
        self._history = history

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:
        """Process the node's row; see :class:`TargetLaws`.

        Raises:
            NumericsError: the row has a NaN or an infinity.
        """
        history = self._history
        if path:
            history = TokenHistory(
                prompt_token_ids=history.prompt_token_ids,
                answer_token_ids=(*history.answer_token_ids, *path),
            )
        return compute_law(self._logits[node_idx + 1], self._params, history)
