"""Settings of the drafter: environment variables ``SPECRAG_DRAFTER_…``."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from specrag_common.speculation.proposals import DraftSource
from specrag_serving.settings import EngineSettings


class DrafterSettings(EngineSettings):
    """One drafter replica; every field has a default that runs the bundled model."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="SPECRAG_DRAFTER_"
    )

    sources: Annotated[tuple[DraftSource, ...], NoDecode] = Field(
        default=(DraftSource.SUFFIX,), min_length=1
    )
    """Sources of requests that name none: ``suffix``, ``model`` or ``suffix,model``."""

    @field_validator("sources", mode="before")
    @classmethod
    def _split_sources(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        names = [name.strip() for name in value.split(",") if name.strip()]
        return tuple(dict.fromkeys(names))
