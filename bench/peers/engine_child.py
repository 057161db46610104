"""Ours, in one process: the engine alone, or with suffix drafters and the real round machine.

Usage: python -m bench.peers.engine_child MODEL --threads N --cache-dir FOLDER

A request names its ``policy``: ``target_only`` or ``joint``; for the latter it carries
``subset_ids``, every drafter's prompt. Prompts are never taken from the prefix cache.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrag_common.speculation.step_costs import StepCosts
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.models.loading import load_model, load_tokenizer

from bench.peers.child import Answer, serve
from bench.peers.single_process import answer_alone, answer_jointly

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag_inference.plan import DtypeName

NUM_BLOCKS = 1024


def load(
    reference: str, *, threads: int, cache_dir: Path, dtype: DtypeName
) -> Callable[[dict[str, Any]], Answer]:
    """Load the model into an engine of the default sizes; no token ends its answers."""
    tokenizer = load_tokenizer(reference, cache_dir)
    model = load_model(reference, dtype=dtype, cache_dir=cache_dir, num_threads=threads)
    endless = replace(model, eos_token_ids=frozenset())
    engine = Engine(endless, tokenizer, EngineConfig(num_blocks=NUM_BLOCKS))
    scopes = itertools.count()
    step_costs = StepCosts()  # the answers of one process share it

    def answer(request: dict[str, Any]) -> Answer:
        scope = str(next(scopes)).encode()
        if request.get("policy") == "joint":
            return answer_jointly(
                engine,
                request["prompt_ids"],
                request["subset_ids"],
                max_tokens=request["max_tokens"],
                cache_scope=scope,
                step_costs=step_costs,
            )
        return answer_alone(
            engine, request["prompt_ids"], max_tokens=request["max_tokens"], cache_scope=scope
        )

    return answer


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    arguments = parser.parse_args()
    serve(
        lambda: load(
            arguments.model,
            threads=arguments.threads,
            cache_dir=arguments.cache_dir,
            dtype=arguments.dtype,
        )
    )


if __name__ == "__main__":
    main()
