"""Replays small passes as CUDA graphs, so that a step costs what the GPU does and no more.

A pass over a few tokens is hundreds of small kernels, and starting them one by one from Python
takes longer than running them. Passes are therefore filled up to few shapes, and each shape is
recorded: the first pass of a shape runs as usual (and compiles what it needs), the second is
recorded, all later ones copy their numbers into the recorded tensors and are replayed.

Tokens that only fill a pass up write their keys to a slot of their own, which no sequence reads,
and nobody asks for their logits. On a CPU a recording simply runs again: the same logits, nothing
gained.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from specrag_inference.attention.flex_layout import round_up_to_power

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from numpy.typing import NDArray

    from specrag_inference.attention.flex import FlexBackend, FlexPass
    from specrag_inference.attention.step import StepInputs

    Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FlexPass], torch.Tensor]

MAX_GRAPH_TOKENS = 256
"""Longer passes are not worth it: their kernels run longer than they take to start."""

MAX_GRAPHS = 48
"""Recorded shapes kept; the one used longest ago goes first."""

MIN_TOKENS = 4


class StepGraphs:
    """Forward passes of one model, recorded by shape.

    Args:
        forward: (token ids, position ids, logit rows, attention) -> [num_logit_rows, vocab_size].
        backend: gives the attention of each pass.
        scratch_slot: a slot that belongs to no block of the pool.
        device: of the model.
    """

    def __init__(
        self,
        forward: Forward,
        backend: FlexBackend,
        *,
        scratch_slot: int,
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._scratch_slot = scratch_slot
        self._device = device
        self._windows: tuple[int | None, ...] | None = None
        self._recorded: OrderedDict[Hashable, _RecordedPass | None] = OrderedDict()

    @staticmethod
    def fits(step: StepInputs) -> bool:
        """Whether a pass is small enough to be worth recording."""
        return len(step.token_ids) <= MAX_GRAPH_TOKENS and len(step.logit_rows) > 0

    def run(self, step: StepInputs) -> torch.Tensor:
        """Return [num_logit_rows, vocab_size]; valid until the next pass."""
        filled = fill_up(step, scratch_slot=self._scratch_slot)
        inputs = _PassInputs(filled, self._backend.prepare(filled), self._device)
        if self._windows is None:
            return self._run_first(inputs)[: len(step.logit_rows)]
        key = inputs.get_key(self._windows)
        recorded = self._recorded.get(key)
        if recorded is not None:
            self._recorded.move_to_end(key)
            logits = recorded.replay(inputs)
        elif key in self._recorded:
            logits = self._record(key, inputs)
        else:
            self._recorded[key] = None
            logits = inputs.run(self._forward)
        self._forget_oldest()
        return logits[: len(step.logit_rows)]

    def _run_first(self, inputs: _PassInputs) -> torch.Tensor:
        """Run the first pass of all, which shows which windows the layers have."""
        logits = inputs.run(self._forward)
        self._windows = inputs.attention.windows
        self._recorded[inputs.get_key(self._windows)] = None
        return logits

    def _record(self, key: Hashable, inputs: _PassInputs) -> torch.Tensor:
        # All the pass builds on first use must exist before it is recorded.
        inputs.run(self._forward)
        self._recorded[key] = recorded = _RecordedPass(inputs, self._forward, self._device)
        return recorded.replay(inputs)

    def _forget_oldest(self) -> None:
        while len(self._recorded) > MAX_GRAPHS:
            self._recorded.popitem(last=False)


class _PassInputs:
    """The tensors of one filled-up pass."""

    def __init__(self, step: StepInputs, attention: FlexPass, device: torch.device) -> None:
        self.attention = attention
        self._numbers = [
            torch.from_numpy(array).to(device)
            for array in (step.token_ids, step.position_ids, step.logit_rows)
        ]

    def get_key(self, windows: tuple[int | None, ...]) -> Hashable:
        """Return what two passes must share to run as one recording."""
        return (
            tuple(tensor.shape for tensor in self._numbers),
            self.attention.get_shapes(windows),
        )

    def run(self, forward: Forward) -> torch.Tensor:
        """Run the pass once."""
        token_ids, position_ids, logit_rows = self._numbers
        return forward(token_ids, position_ids, logit_rows, self.attention)

    def copy_from(self, other: _PassInputs) -> None:
        """Take over another pass's numbers."""
        for mine, theirs in zip(self._numbers, other._numbers, strict=True):
            mine.copy_(theirs)
        self.attention.copy_from(other.attention)


class _RecordedPass:
    """One recording and the tensors it reads."""

    def __init__(self, inputs: _PassInputs, forward: Forward, device: torch.device) -> None:
        self._inputs = inputs
        self._replay = _record(lambda: inputs.run(forward), device)

    def replay(self, inputs: _PassInputs) -> torch.Tensor:
        """Run the recording on other numbers of the same shapes."""
        if inputs is not self._inputs:
            self._inputs.copy_from(inputs)
        return self._replay()


def _record(work: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Return what repeats ``work`` on the tensors it reads now."""
    if device.type != "cuda":
        return work
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay


def fill_up(step: StepInputs, *, scratch_slot: int) -> StepInputs:
    """Return the pass with tokens and wanted rows rounded up to a power of two."""
    num_tokens = max(MIN_TOKENS, round_up_to_power(len(step.token_ids)))
    num_rows = round_up_to_power(len(step.logit_rows))
    return replace(
        step,
        token_ids=_extend(step.token_ids, num_tokens, 0),
        position_ids=_extend(step.position_ids, num_tokens, 0),
        slot_ids=_extend(step.slot_ids, num_tokens, scratch_slot),
        logit_rows=_extend(step.logit_rows, num_rows, 0),
    )


def _extend(array: NDArray[np.int64], length: int, value: int) -> NDArray[np.int64]:
    return np.concatenate([array, np.full(length - len(array), value, dtype=np.int64)])
