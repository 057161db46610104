"""Ingestion and hybrid search over Milvus."""
