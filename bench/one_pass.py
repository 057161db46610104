"""What one forward pass costs: prefill, one-token steps and steps over several tokens.

Usage: python -m bench.one_pass [--model REFERENCE] [--prompt-tokens 1700] [--threads 2]

The same weights, by this core and by transformers' own forward with its dynamic cache, in
turns; medians of ``--repeats``. Wall time: nothing else should run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specrag_inference.models.loading import load_folder, load_model, load_tokenizer
from specrag_inference.models.quiet import quiet_transformers
from specrag_inference.models.reference import BUNDLED_TARGET
from transformers import AutoModelForCausalLM, DynamicCache

from bench.forward_paths import ForwardPaths

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUPS = (1, 4, 8, 16, 32)
NUM_PASSES = 32
SEQUENCES = (1, 16)


class Reference:
    """Transformers' own forward pass."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        with quiet_transformers():
            self._module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    @torch.inference_mode()
    def run(self, prompt_ids: Sequence[int], num_steps: int) -> tuple[float, float]:
        """Return the seconds of the prefill and of one step."""
        cache = DynamicCache()
        began = time.perf_counter()
        self._forward(prompt_ids, cache)
        prefilled = time.perf_counter()
        for token_id in prompt_ids[:num_steps]:
            self._forward([token_id], cache)
        return prefilled - began, (time.perf_counter() - prefilled) / num_steps

    def _forward(self, token_ids: Sequence[int], cache: DynamicCache) -> None:
        self._module(input_ids=torch.tensor([token_ids]), cache=cache, logits_to_keep=1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=Path("~/.cache/specrag/models"))
    parser.add_argument("--prompt-tokens", type=int, default=1700)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    arguments = parser.parse_args()
    cache_dir = arguments.model_cache.expanduser()
    tokenizer = load_tokenizer(arguments.model, cache_dir)
    model = load_model(
        arguments.model, dtype=arguments.dtype, cache_dir=cache_dir, num_threads=arguments.threads
    )
    num_blocks = (
        max(SEQUENCES) * (arguments.prompt_tokens // 16 + 4) + max(GROUPS) * NUM_PASSES // 16
    )
    ours = ForwardPaths(model, tokenizer, num_blocks=num_blocks)
    reference = Reference(load_folder(arguments.model, cache_dir)[1], model.dtype)
    text = "The quick brown fox jumps over the lazy dog. " * arguments.prompt_tokens
    prompt_ids = tokenizer(text)["input_ids"][: arguments.prompt_tokens]
    prefills, theirs = [], []
    steps: dict[int, list[float]] = {group: [] for group in GROUPS}
    for repeat in range(arguments.repeats + 1):  # the first one warms up
        prefill_s, timed = ours.time_steps(prompt_ids, GROUPS, num_passes=NUM_PASSES)
        their = reference.run(prompt_ids, NUM_PASSES)
        if repeat:
            prefills.append(prefill_s)
            theirs.append(their)
            for group, seconds in timed.items():
                steps[group].append(seconds)
    print(f"prompt of {len(prompt_ids)} tokens, {arguments.threads} threads, {arguments.dtype}")
    print(f"prefill tokens/s: {len(prompt_ids) / statistics.median(prefills):.0f}", end="; ")
    print(f"transformers {len(prompt_ids) / statistics.median([one[0] for one in theirs]):.0f}")
    for group in GROUPS:
        print(f"step over {group:2} tokens: {statistics.median(steps[group]) * 1000:.1f} ms")
    for count in SEQUENCES:
        step_s = ours.run_together(prompt_ids, num_sequences=count, num_steps=NUM_PASSES)
        print(f"step over 1 token of each of {count:2} sequences: {step_s * 1000:.1f} ms")
    print(f"transformers, 1 token: {statistics.median([one[1] for one in theirs]) * 1000:.1f} ms")


if __name__ == "__main__":
    main()
