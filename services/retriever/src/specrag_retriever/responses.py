"""Domain values to messages of the contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from specrag.v1 import common_pb2, retriever_pb2

from specrag_retriever.ingestion import IngestStatus
from specrag_retriever.milvus_schema import DENSE_FIELD

if TYPE_CHECKING:
    from collections.abc import Iterable

    from specrag_retriever.catalogue import CollectionInfo
    from specrag_retriever.ingestion import IngestResult
    from specrag_retriever.searching import FoundPassage, SearchOutcome

MAX_RESPONSE_BYTES: Final = 3 * 1024 * 1024
"""A result keeps below it by leaving out the last passages; messages may have 4 MiB."""

_STATUSES: Final = {
    IngestStatus.INDEXED: retriever_pb2.DOCUMENT_STATUS_INDEXED,
    IngestStatus.UNCHANGED: retriever_pb2.DOCUMENT_STATUS_UNCHANGED,
    IngestStatus.SKIPPED: retriever_pb2.DOCUMENT_STATUS_SKIPPED,
}


def encode_search(outcome: SearchOutcome) -> retriever_pb2.SearchResponse:
    """Return the response to a search."""
    response = retriever_pb2.SearchResponse(
        embed_time_us=round(outcome.embed_s * 1e6), search_time_us=round(outcome.search_s * 1e6)
    )
    num_bytes = 0
    for found in outcome.passages:
        passage = encode_passage(found)
        num_bytes += passage.ByteSize()
        if num_bytes > MAX_RESPONSE_BYTES and response.passages:
            break
        response.passages.append(passage)
    return response


def encode_passage(found: FoundPassage) -> common_pb2.Passage:
    """Return a passage; its embedding too where it was asked for."""
    fields = found.fields
    passage = common_pb2.Passage(
        chunk_id=fields["chunk_id"],
        document_id=fields["document_id"],
        title=fields["title"],
        uri=fields["uri"],
        text=fields["text"],
        start_char=fields["start_char"],
        end_char=fields["end_char"],
        score=found.score,
        metadata=fields["metadata"],
    )
    if DENSE_FIELD in fields:
        vector = np.asarray(fields[DENSE_FIELD], dtype="<f4")
        passage.embedding.dtype = common_pb2.ELEMENT_TYPE_FLOAT32
        passage.embedding.shape.append(len(vector))
        passage.embedding.data = vector.tobytes()
    return passage


def encode_results(results: Iterable[IngestResult]) -> retriever_pb2.UpsertDocumentsResponse:
    """Return the response to an upsert."""
    return retriever_pb2.UpsertDocumentsResponse(
        results=[
            retriever_pb2.DocumentResult(
                document_id=one.document_id,
                status=_STATUSES[one.status],
                num_passages=one.num_passages,
                reason=one.reason,
                detail=one.detail,
            )
            for one in results
        ]
    )


def encode_collection(
    info: CollectionInfo, counts: tuple[int, int] = (0, 0)
) -> retriever_pb2.Collection:
    """Return a collection with a tenant's numbers of documents and passages."""
    return retriever_pb2.Collection(
        name=info.name,
        embedder_fingerprint=info.embedder_fingerprint,
        embedding_dim=info.embedding_dim,
        max_passage_tokens=info.max_passage_tokens,
        num_documents=counts[0],
        num_passages=counts[1],
    )
