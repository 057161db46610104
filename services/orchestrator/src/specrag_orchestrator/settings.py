"""Settings of the orchestrator, from ``SPECRAG_ORCHESTRATOR_*``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from specrag_common.runtime.settings import ServiceSettings


class OrchestratorSettings(ServiceSettings):
    """Where the other services are, and how much one process takes on."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        env_prefix="SPECRAG_ORCHESTRATOR_"
    )

    retriever_address: str
    """gRPC address of the retriever, ``host:port`` or ``dns:///name:port``."""

    verifier_address: str
    """gRPC address of the verifier."""

    drafter_addresses: Annotated[tuple[str, ...], NoDecode] = ()
    """gRPC addresses of the drafters, separated by commas; their order gives their indices."""

    redis_url: str = ""
    """Redis of the turn log, never evictable; empty: requests with a session are refused."""

    num_passages: int = Field(default=8, ge=1, le=30)
    """Passages retrieved for a question that states no number."""

    max_concurrent_answers: int = Field(default=64, ge=1, le=10_000)
    """Answers under way at once; more are refused with RESOURCE_EXHAUSTED."""

    answer_timeout_s: float = Field(default=120.0, gt=0, le=3600)
    """Time an answer may take when its caller set no deadline."""

    retrieval_timeout_s: float = Field(default=10.0, gt=0, le=120)
    """Longest search."""

    drafter_connect_ms: float = Field(default=300.0, ge=0, le=10_000)
    """Longest time a question waits to learn whether a drafter can be reached."""

    max_gamma: int = Field(default=8, ge=1, le=64)
    """Most draft tokens a branch when the request does not say."""

    max_draft_tokens: int = Field(default=64, ge=1, le=256)
    """Proposed tokens a round over all drafters, before merging."""

    max_draft_wait_ms: float = Field(default=500.0, gt=0, le=10_000)
    """Longest time a round waits for proposals."""

    first_draft_wait_ms: float = Field(default=50.0, ge=0, le=10_000)
    """Longest time the first round waits for proposals once the target has read its prompt."""

    session_ttl_days: float = Field(default=30.0, gt=0, le=3650)
    """How long a session lives without a turn."""

    @field_validator("drafter_addresses", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Read a comma list; blanks around and between commas do not count."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())
