"""Runs the drafter: ``python -m specrag_drafter``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.runtime.lifecycle import run_service
from specrag_common.runtime.settings import load_settings

from specrag_drafter.hosting import start_drafter
from specrag_drafter.settings import DrafterSettings

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle


def main() -> None:
    """Serve until told to stop; never returns."""
    settings = load_settings(DrafterSettings)

    async def build(lifecycle: Lifecycle) -> None:
        await start_drafter(settings, lifecycle)

    run_service("drafter", settings, build)


if __name__ == "__main__":
    main()
