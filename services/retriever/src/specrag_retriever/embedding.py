"""Texts to unit vectors, in a thread of its own.

torch releases the interpreter lock while it computes, so the event loop keeps running; nothing
here computes on the loop. Queries overtake documents: one batch of documents is the longest a
query waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from specrag_common.runtime.span_names import SpanKey, SpanName
from specrag_common.runtime.telemetry import span
from specrag_inference.models.fingerprint import file_digest
from specrag_inference.models.loading import load_folder, resolve_dtype
from specrag_inference.models.quiet import quiet_transformers
from tokenizers import Tokenizer
from transformers import AutoModel

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from specrag_retriever.embedder import Urgency

BATCH_SIZE: Final = 8
"""Windows in one forward pass: about 0.2 s on two cores, the longest a query waits."""

MAX_WINDOW_TOKENS: Final = 256
"""Word pieces the bundled embedder was trained to read, special tokens included."""

_FINGERPRINT_FORMAT: Final = b"mean-pooling;unit-length;1"


class MeanPoolingEncoder:
    """A sentence encoder: mean of the last hidden states, scaled to length 1. Blocking."""

    def __init__(self, folder: Path) -> None:
        """Load weights and tokenizer from a model folder.

        In bf16 where the processor computes in it: twice as fast, and the vectors' cosine with
        those of float32 is 0.9999, so both may fill one collection.
        """
        self.tokenizer = _load_tokenizer(folder)
        self._input_tokenizer = _load_tokenizer(folder)
        with quiet_transformers():
            self._model = AutoModel.from_pretrained(
                folder,
                dtype=resolve_dtype("auto", torch.device("cpu")),
                local_files_only=True,
            )
        self._model.eval()
        limit = int(self._model.config.max_position_embeddings)
        self.max_window_tokens = min(MAX_WINDOW_TOKENS, limit)
        self._input_tokenizer.enable_truncation(self.max_window_tokens)
        self._input_tokenizer.enable_padding()
        self.dim = int(self._model.config.hidden_size)
        self.fingerprint = _fingerprint(folder)

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return [num_texts, dim] float32 rows of length 1."""
        encodings = self._input_tokenizer.encode_batch(list(texts))
        token_ids = torch.tensor([one.ids for one in encodings])
        mask = torch.tensor([one.attention_mask for one in encodings])
        hidden = self._model(input_ids=token_ids, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).float()
        pooled = (hidden.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
        rows: NDArray[np.float32] = torch.nn.functional.normalize(pooled, dim=1).numpy()
        return rows


def load_encoder(reference: str, cache_dir: Path, num_threads: int) -> MeanPoolingEncoder:
    """Load the encoder a model reference names; torch uses ``num_threads`` in this process."""
    torch.set_num_threads(num_threads)
    _, folder = load_folder(reference, cache_dir)
    return MeanPoolingEncoder(folder)


def load_counting_tokenizer(reference: str, cache_dir: Path) -> Tokenizer:
    """Load the tokenizer that counts passage tokens; it neither pads nor truncates."""
    _, folder = load_folder(reference, cache_dir)
    return _load_tokenizer(folder)


@dataclass(order=True, slots=True)
class _Job:
    urgency: int
    order: int
    texts: Sequence[str] = field(compare=False)
    result: Future[NDArray[np.float32]] | None = field(compare=False)


class EmbeddingWorker:
    """An ``Embedder`` around an encoder and one thread; ``close`` it at the end."""

    def __init__(self, encoder: MeanPoolingEncoder) -> None:
        """Start the thread."""
        self._encoder = encoder
        self._jobs: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._work, name="embedder", daemon=True)
        self._thread.start()

    @property
    def fingerprint(self) -> str:
        """See the protocol."""
        return self._encoder.fingerprint

    @property
    def dim(self) -> int:
        """See the protocol."""
        return self._encoder.dim

    @property
    def max_window_tokens(self) -> int:
        """See the protocol."""
        return self._encoder.max_window_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """See the protocol."""
        return self._encoder.tokenizer

    async def embed(self, texts: Sequence[str], urgency: Urgency) -> NDArray[np.float32]:
        """See the protocol; batches of similar length, waiting is cancellable."""
        if not texts:
            return np.zeros((0, self.dim), dtype=np.float32)
        with span(SpanName.EMBED, {SpanKey.NUM_CHUNKS: len(texts)}):
            order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
            rows = np.empty((len(texts), self.dim), dtype=np.float32)
            for at in range(0, len(order), BATCH_SIZE):
                batch = order[at : at + BATCH_SIZE]
                rows[batch] = await self._embed_batch([texts[index] for index in batch], urgency)
            return rows

    async def close(self) -> None:
        """Finish the batch at hand and end the thread."""
        self._jobs.put(_Job(-1, next(self._order), (), None))
        await asyncio.to_thread(self._thread.join)

    async def _embed_batch(self, texts: Sequence[str], urgency: Urgency) -> NDArray[np.float32]:
        result: Future[NDArray[np.float32]] = Future()
        self._jobs.put(_Job(int(urgency), next(self._order), texts, result))
        return await asyncio.wrap_future(result)

    def _work(self) -> None:
        """Body of the thread."""
        while (result := (job := self._jobs.get()).result) is not None:
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(self._encoder.encode(job.texts))
            except Exception as exc:  # noqa: BLE001 - handed to whoever waits
                result.set_exception(exc)


def _load_tokenizer(folder: Path) -> Tokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _fingerprint(folder: Path) -> str:
    """Return a digest of whole weight files and tokenizer: one changed number is another space."""
    digest = hashlib.sha256(_FINGERPRINT_FORMAT)
    for path in [*sorted(folder.glob("*.safetensors")), folder / "tokenizer.json"]:
        digest.update(file_digest(path).encode())
    return digest.hexdigest()[:32]
