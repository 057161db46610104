"""What a caller may choose about a local stack."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

if TYPE_CHECKING:
    from collections.abc import Mapping

MIN_DRAFTERS: Final = 1
MAX_DRAFTERS: Final = 16


class UserFolders(BaseSettings):
    """Folders of the user, by the XDG rules."""

    model_config: ClassVar[SettingsConfigDict] = SettingsConfigDict(frozen=True)

    xdg_cache_home: Path | None = Field(default=None)
    """Folder for files that can be made again; ``~/.cache`` when it is not set."""

    @property
    def model_cache(self) -> Path:
        """Where converted models are kept, shared by all stacks of the user."""
        home = self.xdg_cache_home
        if home is None or not home.is_absolute():
            home = Path.home() / ".cache"
        return home / "specrag" / "models"


def current_environment() -> dict[str, str]:
    """Return this process's variables, for child processes to inherit."""
    return dict(os.environ)  # noqa: TID251 - handed to child processes, not read as settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """A local stack to start.

    Attributes:
        directory: folder of the stack.
        num_drafters: drafter processes, 1 to 16.
        redis_url: a Redis to use instead of starting one.
        milvus_uri: a Milvus to use instead of starting one.
        target_model: model reference of the verifier; the bundled one when absent.
        draft_model: model reference of the drafters; the bundled one when absent.
        model_cache_dir: where converted models are kept; the user's cache when absent.
        start_timeout_s: longest time until everything is healthy.
        drain_grace_s: longest time running answers get when the stack stops.
        kill_margin_s: time beyond it after which a process is killed.
        foreground: the caller stays, and when it is killed the stack ends too.
        environment: variables the services inherit; ``SPECRAG_<SERVICE>_…`` among them reach only
            their service.
        settings: settings of single processes by name (``verifier``, ``drafter-1`` …) without
            their prefix; they win over the environment.
    """

    directory: Path
    num_drafters: int = 2
    redis_url: str | None = None
    milvus_uri: str | None = None
    target_model: str | None = None
    draft_model: str | None = None
    model_cache_dir: Path | None = None
    start_timeout_s: float = 300.0
    drain_grace_s: float = 30.0
    kill_margin_s: float = 10.0
    foreground: bool = False
    environment: Mapping[str, str] = field(default_factory=current_environment)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
