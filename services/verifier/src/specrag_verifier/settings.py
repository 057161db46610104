"""Settings of the verifier: environment variables ``SPECRAG_VERIFIER_…``."""

from __future__ import annotations

from typing import ClassVar

from pydantic_settings import SettingsConfigDict
from specrag_serving.settings import EngineSettings


class VerifierSettings(EngineSettings):
    """One verifier replica; every field has a default that runs the bundled model."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="SPECRAG_VERIFIER_"
    )
