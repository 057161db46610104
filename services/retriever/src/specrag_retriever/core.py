"""What the service is made of once its models are loaded, and whether they are."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.errors import FailedPrecondition, SpecragError, UpstreamUnavailable
from specrag_common.runtime.logs import get_logger
from specrag_inference.models.reference import ModelReferenceError

from specrag_retriever.embedding import (
    EmbeddingWorker,
    load_counting_tokenizer,
    load_encoder,
)
from specrag_retriever.ingestion import Ingestor
from specrag_retriever.searching import PassageSearcher
from specrag_retriever.store import MilvusStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizers import Tokenizer

    from specrag_retriever.embedder import Embedder
    from specrag_retriever.milvus_connection import MilvusConnection

_PROBE_INTERVAL_S: Final = 1.0
_SPLITTER_THREADS: Final = 2

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyParts:
    """Everything requests need."""

    connection: MilvusConnection
    store: MilvusStore
    embedder: Embedder
    searcher: PassageSearcher
    ingestor: Ingestor


class RetrieverCore:
    """Loads the models beside the running server and watches Milvus; ``close`` it at the end."""

    def __init__(self, connection: MilvusConnection, on_ready: Callable[[bool], None]) -> None:
        """Tell ``on_ready`` each time the service becomes able, or unable, to work."""
        self._connection = connection
        self._on_ready = on_ready
        self._parts: ReadyParts | None = None
        self._worker: EmbeddingWorker | None = None
        self._executor = ThreadPoolExecutor(_SPLITTER_THREADS, thread_name_prefix="splitter")

    def ready(self) -> ReadyParts:
        """Return the parts.

        Raises:
            UpstreamUnavailable: the models are still being loaded.
        """
        if self._parts is None:
            raise UpstreamUnavailable(
                "the retriever is still loading its models", reason="LOADING", retry_delay_s=1.0
            )
        return self._parts

    async def load(
        self, *, embedder: str, passage_tokenizer: str, cache_dir: Path, num_threads: int
    ) -> None:
        """Load the models in a thread; requests are served from then on.

        Raises:
            FailedPrecondition: a model reference names nothing.
        """
        try:
            encoder = await asyncio.to_thread(load_encoder, embedder, cache_dir, num_threads)
            tokenizer = await asyncio.to_thread(
                load_counting_tokenizer, passage_tokenizer, cache_dir
            )
        except ModelReferenceError as exc:
            raise FailedPrecondition(str(exc), reason="MODEL_NOT_FOUND") from exc
        self._worker = EmbeddingWorker(encoder)
        self.assemble(self._worker, tokenizer)
        _log.info("models loaded", embedder=embedder, fingerprint=encoder.fingerprint)

    def assemble(self, embedder: Embedder, passage_tokenizer: Tokenizer) -> None:
        """Put the parts together around an embedder; requests are served from then on."""
        store = MilvusStore(self._connection)
        self._parts = ReadyParts(
            connection=self._connection,
            store=store,
            embedder=embedder,
            searcher=PassageSearcher(store, embedder),
            ingestor=Ingestor(store, embedder, passage_tokenizer, self._executor),
        )

    async def watch_milvus(self) -> None:
        """Keep the ready flag true to whether Milvus answers; runs until cancelled."""
        was_up: bool | None = None
        while True:
            is_up = await self._is_milvus_up()
            if is_up is not was_up:
                self._on_ready(is_up and self._parts is not None)
                if is_up:
                    _log.info("milvus answers", uri=self._connection.uri)
                else:
                    _log.warning("milvus does not answer", uri=self._connection.uri)
                was_up = is_up
            await asyncio.sleep(_PROBE_INTERVAL_S)

    async def close(self) -> None:
        """Finish the write at hand, then end threads and connection."""
        if self._parts is not None:
            await self._parts.store.close()
        if self._worker is not None:
            await self._worker.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(SpecragError):
            await self._connection.close()

    async def _is_milvus_up(self) -> bool:
        try:
            await self._connection.probe()
            await self._connection.abilities()
        except SpecragError:
            return False
        return True
