"""Runs the verifier: ``python -m specrag_verifier``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.runtime.lifecycle import run_service
from specrag_common.runtime.settings import load_settings

from specrag_verifier.hosting import start_verifier
from specrag_verifier.settings import VerifierSettings

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle


def main() -> None:
    """Serve until told to stop; never returns."""
    settings = load_settings(VerifierSettings)

    async def build(lifecycle: Lifecycle) -> None:
        await start_verifier(settings, lifecycle)

    run_service("verifier", settings, build)


if __name__ == "__main__":
    main()
