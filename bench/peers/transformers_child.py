"""Peer: transformers' ``generate()``, plain or with its prompt lookup.

Usage: python -m bench.peers.transformers_child MODEL_FOLDER --threads N

A request with ``lookup_tokens`` is answered by prompt lookup.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from bench.peers.child import Answer, Stopwatch, serve

if TYPE_CHECKING:
    from collections.abc import Callable


class _Arrivals(BaseStreamer):
    """Hands new tokens to the stopwatch; the first put is the prompt."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """Take what ``generate`` has decided."""
        if self._has_prompt:
            self._watch.note(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is buffered."""


def load(folder: str, *, threads: int) -> Callable[[dict[str, Any]], Answer]:
    """Load the model; an answer never ends before its length."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def answer(request: dict[str, Any]) -> Answer:
        lookup = request.get("lookup_tokens")
        extra = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}
        prompt = torch.tensor([request["prompt_ids"]])
        watch = Stopwatch()
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request["max_tokens"],
            do_sample=False,
            streamer=_Arrivals(watch),
            pad_token_id=0,
            **extra,
        )
        return watch.stop()

    return answer


def main() -> None:
    """Serve."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    serve(lambda: load(arguments.folder, threads=arguments.threads))


if __name__ == "__main__":
    main()
