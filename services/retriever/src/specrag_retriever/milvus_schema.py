"""The schema of a collection: one row a search window, pointing to its passage.

A passage is what is returned, a window what is searched; each window row carries its passage, so
that one search brings the answer. Row 0 of a document is written last: its presence says that the
document is complete.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pymilvus import DataType, Function, FunctionType, MilvusClient

from specrag_retriever.catalogue import encode_info

if TYPE_CHECKING:
    from pymilvus.milvus_client.index import IndexParams
    from pymilvus.orm.schema import CollectionSchema

    from specrag_retriever.catalogue import CollectionInfo

DENSE_FIELD: Final = "dense"
LEXICAL_FIELD: Final = "sparse"
LEXICAL_TEXT_FIELD: Final = "lexical_text"
MAX_VARCHAR_BYTES: Final = 65_535

PASSAGE_FIELDS: Final = (
    "chunk_id", "window_idx", "document_id", "version", "title", "uri", "text", "start_char",
    "end_char", "metadata",
)  # fmt: skip
"""Fields a search returns."""

_VARCHARS: Final = {
    "chunk_id": 64,
    "document_id": 4 * 512,
    "version": 64,
    "title": 4 * 1024,
    "uri": 4 * 2048,
    "text": MAX_VARCHAR_BYTES,
}
_NUMBERS: Final = (
    "row_idx", "num_passages", "num_rows", "passage_idx", "window_idx", "start_char", "end_char",
)  # fmt: skip

HNSW_PARAMS: Final = {"M": 16, "efConstruction": 200}


def build_schema(info: CollectionInfo) -> CollectionSchema:
    """Return the schema; without a keyword index where the server has none."""
    description, _ = encode_info(info)
    schema = MilvusClient.create_schema(
        auto_id=False, enable_dynamic_field=False, description=description
    )
    schema.add_field("row_id", DataType.VARCHAR, is_primary=True, max_length=64)
    schema.add_field("tenant", DataType.VARCHAR, max_length=4 * 128, is_partition_key=True)
    for name, max_length in _VARCHARS.items():
        schema.add_field(name, DataType.VARCHAR, max_length=max_length)
    for name in _NUMBERS:
        schema.add_field(name, DataType.INT64)
    schema.add_field("metadata", DataType.JSON)
    schema.add_field(DENSE_FIELD, DataType.FLOAT_VECTOR, dim=info.embedding_dim)
    if info.has_lexical:
        schema.add_field(
            LEXICAL_TEXT_FIELD,
            DataType.VARCHAR,
            max_length=MAX_VARCHAR_BYTES,
            enable_analyzer=True,
            analyzer_params={"tokenizer": "standard", "filter": ["lowercase"]},
        )
        schema.add_field(LEXICAL_FIELD, DataType.SPARSE_FLOAT_VECTOR)
        schema.add_function(
            Function(
                name="bm25",
                function_type=FunctionType.BM25,
                input_field_names=[LEXICAL_TEXT_FIELD],
                output_field_names=[LEXICAL_FIELD],
            )
        )
    return schema


def build_indexes(info: CollectionInfo) -> IndexParams:
    """Return the indexes: HNSW with cosine over vectors, an inverted one with BM25 over words."""
    indexes = MilvusClient.prepare_index_params()
    indexes.add_index(DENSE_FIELD, index_type="HNSW", metric_type="COSINE", params=HNSW_PARAMS)
    if info.has_lexical:
        indexes.add_index(LEXICAL_FIELD, index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
    return indexes
