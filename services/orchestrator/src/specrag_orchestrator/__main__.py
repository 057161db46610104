"""Runs the orchestrator: ``python -m specrag_orchestrator``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.runtime.lifecycle import run_service
from specrag_common.runtime.settings import load_settings

from specrag_orchestrator.hosting import start_orchestrator
from specrag_orchestrator.settings import OrchestratorSettings

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle


def main() -> None:
    """Serve until told to stop; never returns."""
    settings = load_settings(OrchestratorSettings)

    async def build(lifecycle: Lifecycle) -> None:
        await start_orchestrator(settings, lifecycle)

    run_service("orchestrator", settings, build)


if __name__ == "__main__":
    main()
