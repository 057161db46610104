"""The seam between the engine and whatever executes its forward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.runner import LogitRows


class StepRunner(Protocol):
    """Owns a model and the cache memory of ``num_blocks * block_size`` slots.

    Called from one thread, one call at a time, in the order the engine decides. A runner over
    several ranks repeats both calls on all of them, in that order.
    """

    def execute(self, step: StepInputs) -> LogitRows:
        """Run one forward pass and return the logits of ``step.logit_rows``, in their order.

        Keys and values of the pass's tokens are stored at ``step.slot_ids``. Errors are fatal for
        the engine: the state of the cache is not known any more.
        """
        ...

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Copy stored tokens slot by slot in all layers, as if all were read before any written."""
        ...
