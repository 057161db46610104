"""Peer: llama.cpp's server, in this process, on the GGUF file itself.

Usage: LLAMA_PYTHON -m bench.peers.llama_child FILE.gguf [--threads N]

Runs in an environment of its own (``pip install xllamacpp``); needs nothing of this project's.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from bench.peers.child import Answer, Stopwatch, serve

if TYPE_CHECKING:
    from collections.abc import Callable

CONTEXT_TOKENS = 4096

UNKNOWN_TOKEN = -1
"""Stands for every token: the server sends text."""


def load(path: str, *, threads: int) -> Callable[[dict[str, Any]], Answer]:
    """Load the file; prompts are never taken from a cache."""
    import xllamacpp  # type: ignore[import-not-found]  # noqa: PLC0415 - not of this environment

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = CONTEXT_TOKENS
    params.n_parallel = 1
    params.cache_prompt = False
    params.cache_ram_mib = 0
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def answer(request: dict[str, Any]) -> Answer:
        watch, num_noted = Stopwatch(), 0

        def note(chunk: dict[str, Any]) -> None:
            nonlocal num_noted
            usage = chunk.get("usage")
            shown = sum(bool(choice.get("text")) for choice in chunk["choices"])
            # Tokens that end inside a character show no text; the last chunk counts them.
            num_new = usage["completion_tokens"] - num_noted if usage else shown
            num_noted += num_new
            watch.note([UNKNOWN_TOKEN] * num_new)

        server.handle_completions(
            {
                "prompt": request["prompt_ids"],
                "max_tokens": request["max_tokens"],
                "temperature": 0.0,
                "ignore_eos": True,
                "cache_prompt": False,
                "stream": True,
            },
            note,
        )
        return watch.stop()

    return answer


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: load(arguments.path, threads=arguments.threads))


if __name__ == "__main__":
    main()
