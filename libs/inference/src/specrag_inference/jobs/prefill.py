"""Bringing a prompt into the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_inference.jobs.job import Extension
from specrag_inference.messages import SequenceOpened

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specrag_inference.jobs.job import ExtensionLogits
    from specrag_inference.messages import EngineEvent
    from specrag_inference.sequence import SequenceState


class PrefillJob:
    """Computes all committed tokens but the last, which the first round computes with its tree."""

    def __init__(self, sequence: SequenceState, *, num_cached_tokens: int) -> None:
        self._sequence = sequence
        self._num_cached_tokens = num_cached_tokens

    @property
    def sequence(self) -> SequenceState:
        """See :class:`~specrag_inference.jobs.job.Job`."""
        return self._sequence

    def start(self) -> None:
        """Nothing to do: admission has taken up the cached prefix."""

    def next_extension(self) -> Extension | None:
        """Return the tokens still missing, without logits."""
        missing = self._sequence.num_pending - 1
        return Extension(num_chain=missing, wants_logits=False) if missing > 0 else None

    def complete(self, logits: ExtensionLogits, *, forward_s: float) -> Iterable[EngineEvent]:  # noqa: ARG002 - part of the seam
        """Nothing to decide."""
        return ()

    def finish(self, *, elapsed_s: float) -> Iterable[EngineEvent]:
        """Report the open sequence."""
        yield SequenceOpened(
            sequence_id=self._sequence.sequence_id,
            num_prompt_tokens=self._sequence.num_prompt_tokens,
            num_cached_tokens=min(self._num_cached_tokens, self._sequence.num_prompt_tokens),
            prefill_s=elapsed_s,
        )
