"""Executes one forward pass: arrays in, logits of the wanted rows out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specrag_inference.attention.dense import DenseBackend
from specrag_inference.attention.flex import FlexBackend, pad_blocks
from specrag_inference.attention.sdpa import SdpaBackend
from specrag_inference.cache.quantized import QuantizedStorage
from specrag_inference.cache.storage import KvStorage
from specrag_inference.cache.transposed import TransposedKvStorage
from specrag_inference.models.fused_decoder import fuse_decoder
from specrag_inference.step_graphs import StepGraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from specrag_inference.attention.backends import AttentionBackend, PreparedAttention
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.engine_config import KvCacheDtype
    from specrag_inference.models.loading import LoadedModel

UNKNOWN_TOKEN_LOGIT = -1e9
"""Logit of an id inside the vocabulary that the tokenizer lacks: finite, and never drawn."""

_MAX_LOGPROB_ROWS = 64
"""Rows whose logits are brought to float32 at once."""

BACKENDS: dict[str, Callable[[Any], AttentionBackend]] = {
    "dense": DenseBackend,
    "sdpa": SdpaBackend,
    "flex": FlexBackend,
}

LAYOUTS: dict[str, Callable[..., Any]] = {
    "dense": KvStorage,
    "sdpa": TransposedKvStorage,
    "flex": KvStorage,
}
"""The layout of cache memory that each backend reads."""


def choose_backend(name: str, device: torch.device) -> str:
    """Return the backend's name; ``auto`` is ``flex`` on a GPU and ``sdpa`` on a CPU."""
    if name != "auto":
        return name
    return "flex" if device.type == "cuda" else "sdpa"


@dataclass(frozen=True, slots=True)
class TokenVocabulary:
    """Which of a model's output rows are tokens.

    Attributes:
        size: one more than the largest id of the tokenizer; larger ids are padding.
        holes: [num_holes] int64 ids below ``size`` that the tokenizer lacks.
    """

    size: int
    holes: NDArray[np.int64]

    @staticmethod
    def from_ids(token_ids: Collection[int], model_vocab_size: int) -> TokenVocabulary:
        """Build from the ids a tokenizer knows; ids beyond the model's rows do not count."""
        known = np.zeros(model_vocab_size, dtype=np.bool_)
        known[[token_id for token_id in token_ids if token_id < model_vocab_size]] = True
        size = int(np.flatnonzero(known)[-1]) + 1
        return TokenVocabulary(size=size, holes=np.flatnonzero(~known[:size]))


class LogitRows:
    """Logits of one pass's wanted rows; a row reaches numpy only when it is asked for."""

    def __init__(self, logits: torch.Tensor, holes: NDArray[np.int64]) -> None:
        self._logits = logits
        self._holes = holes

    def row(self, row_idx: int) -> NDArray[np.float32]:
        """Return [vocab_size] float32 logits of one row, the caller's own copy."""
        row: NDArray[np.float32] = self._logits[row_idx].to(torch.float32, copy=True).cpu().numpy()
        if self._holes.size:
            row[self._holes] = UNKNOWN_TOKEN_LOGIT
        return row

    def compute_logprobs(
        self, row_idx: Sequence[int], token_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        """Return [num_tokens]: the natural log of each row's raw law at a token of its own.

        The raw law is the softmax of the logits over the tokenizer's ids: temperature 1, no
        processors. A row with a NaN gives NaN.
        """
        found = np.empty(len(row_idx), dtype=np.float32)
        for start in range(0, len(row_idx), _MAX_LOGPROB_ROWS):
            some = slice(start, start + _MAX_LOGPROB_ROWS)
            found[some] = self._compute_logprobs(row_idx[some], token_ids[some])
        return found

    def _compute_logprobs(
        self, row_idx: Sequence[int], token_ids: Sequence[int]
    ) -> NDArray[np.float32]:
        device = self._logits.device
        logits = self._logits[torch.tensor(row_idx, device=device)].float()
        logits[:, self._holes] = UNKNOWN_TOKEN_LOGIT
        tokens = torch.tensor(token_ids, device=device)[:, None]
        found: NDArray[np.float32] = (
            logits.log_softmax(dim=-1).gather(1, tokens)[:, 0].cpu().numpy()
        )
        return found


class ModelRunner:
    """One model, its cache memory and its attention; knows nothing of sequences or requests."""

    def __init__(
        self,
        model: LoadedModel,
        vocabulary: TokenVocabulary,
        *,
        num_blocks: int,
        block_size: int,
        backend: str = "auto",
        fuse: bool = True,
        cuda_graphs: bool = False,
        kv_cache_dtype: KvCacheDtype = "auto",
    ) -> None:
        self._module = model.module
        self._fused = fuse_decoder(model.module) if fuse else None
        self._device = model.device
        self._vocabulary = vocabulary
        name = choose_backend(backend, model.device)
        layout = LAYOUTS[name]
        if kv_cache_dtype != "auto":
            layout = partial(QuantizedStorage, layout, kv_cache_dtype)
        self._storage = layout(
            num_layers=model.num_layers,
            num_blocks=pad_blocks(num_blocks, block_size) if name == "flex" else num_blocks,
            block_size=block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            device=model.device,
        )
        self._backend = BACKENDS[name](self._storage)
        self._graphs: StepGraphs | None = None
        if cuda_graphs and isinstance(self._backend, FlexBackend):
            self._graphs = StepGraphs(
                self._compute,
                self._backend,
                scratch_slot=num_blocks * block_size,
                device=model.device,
            )

    @torch.inference_mode()
    def execute(self, step: StepInputs) -> LogitRows:
        """Run one forward pass; keys and values of its tokens are stored in the cache."""
        logits = self._forward(step)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return LogitRows(logits[:, : self._vocabulary.size], self._vocabulary.holes)

    @torch.inference_mode()
    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        """Move stored tokens; see :class:`~specrag_inference.cache.block_table.SlotCopier`."""
        self._storage.copy_slots(source, destination)

    def _forward(self, step: StepInputs) -> torch.Tensor:
        """Return [num_logit_rows, vocab_size]."""
        if self._graphs is not None and self._graphs.fits(step):
            return self._graphs.run(step)
        return self._compute(
            self._to_device(step.token_ids),
            self._to_device(step.position_ids),
            self._to_device(step.logit_rows),
            self._backend.prepare(step),
        )

    def _compute(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logit_rows: torch.Tensor,
        attention: PreparedAttention,
    ) -> torch.Tensor:
        if self._fused is not None:
            return self._fused.forward(token_ids, position_ids, logit_rows, attention)
        output = self._module(
            input_ids=token_ids[None],
            position_ids=position_ids[None],
            logits_to_keep=logit_rows,
            use_cache=False,
            prepared_attention=attention,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _to_device(self, array: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
