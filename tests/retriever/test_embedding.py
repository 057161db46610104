"""The bundled embedder, for real."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
from specrag_retriever.embedder import Urgency
from specrag_retriever.embedding import (
    BATCH_SIZE,
    EmbeddingWorker,
    MeanPoolingEncoder,
    load_encoder,
)

from tests.retriever.serving import EMBEDDER_REFERENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> MeanPoolingEncoder:
    return load_encoder(EMBEDDER_REFERENCE, tmp_path_factory.mktemp("models"), num_threads=1)


@pytest.fixture
async def worker(encoder: MeanPoolingEncoder) -> AsyncIterator[EmbeddingWorker]:
    embedding = EmbeddingWorker(encoder)
    yield embedding
    await embedding.close()


async def test_vectors_have_length_one_and_keep_the_order(worker: EmbeddingWorker) -> None:
    texts = [f"text number {index} " * (1 + index % 7) for index in range(2 * BATCH_SIZE + 3)]
    together = await worker.embed(texts, Urgency.DOCUMENT)
    assert together.shape == (len(texts), worker.dim)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-3)
    alone = await worker.embed([texts[5]], Urgency.QUERY)
    assert float(alone[0] @ together[5]) > 0.999


async def test_meaning_decides_what_is_near(worker: EmbeddingWorker) -> None:
    rows = await worker.embed(
        ["How long is the warranty?", "The guarantee lasts three years.", "Cats sleep a lot."],
        Urgency.QUERY,
    )
    assert rows[0] @ rows[1] > rows[0] @ rows[2] + 0.2


async def test_loop_keeps_running_while_texts_are_embedded(worker: EmbeddingWorker) -> None:
    embedding = asyncio.create_task(worker.embed(["word " * 250] * 16, Urgency.DOCUMENT))
    longest = 0.0
    while not embedding.done():
        began = time.perf_counter()
        await asyncio.sleep(0.005)
        longest = max(longest, time.perf_counter() - began)
    assert longest < 0.25


async def test_query_overtakes_documents(worker: EmbeddingWorker) -> None:
    documents = asyncio.create_task(worker.embed(["word " * 250] * 32, Urgency.DOCUMENT))
    await asyncio.sleep(0.05)
    await worker.embed(["short question"], Urgency.QUERY)
    assert not documents.done()
    documents.cancel()


async def test_fingerprint_is_the_same_for_the_same_weights(
    encoder: MeanPoolingEncoder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    again = load_encoder(EMBEDDER_REFERENCE, tmp_path_factory.mktemp("again"), num_threads=1)
    assert again.fingerprint == encoder.fingerprint
    assert encoder.max_window_tokens == 256


async def test_no_texts_need_no_work(worker: EmbeddingWorker) -> None:
    assert (await worker.embed([], Urgency.QUERY)).shape == (0, worker.dim)
