"""Runs the retriever: ``python -m specrag_retriever``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag_common.runtime.lifecycle import run_service
from specrag_common.runtime.settings import load_settings

from specrag_retriever.settings import RetrieverSettings

if TYPE_CHECKING:
    from specrag_common.runtime.lifecycle import Lifecycle


def main() -> None:
    """Serve until told to stop; never returns."""
    settings = load_settings(RetrieverSettings)

    async def build(lifecycle: Lifecycle) -> None:
        # Brings in torch, which takes seconds: bad settings are reported before that.
        from specrag_retriever.hosting import start_retriever  # noqa: PLC0415 - see above

        await start_retriever(settings, lifecycle)

    run_service("retriever", settings, build)


if __name__ == "__main__":
    main()
