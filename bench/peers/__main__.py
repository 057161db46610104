"""This engine and its peers on the same prompts, one request at a time.

Usage: python -m bench.peers --data FOLDER --vllm-python PATH --llama-python PATH
       [--peers NAME …] [--prompts 12] [--out R.json] [--answers ANSWERS.json]

The same weights: bf16 for transformers (``generate``, ``lookup``), vLLM (``vllm``, ``vllm-ngram``)
and ours (``ours-alone``, ``ours-joint`` in one process, ``ours-mesh`` through the services), the
GGUF file for llama.cpp (``llama``). Every prompt goes to all peers in turn, in an order that moves
on by one a prompt; the others are halted meanwhile. Greedy, ``--max-tokens`` each: an
end-of-sequence token ends nothing (the mesh rules it out instead).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from specrag_inference.models.loading import load_folder, load_tokenizer
from specrag_inference.models.reference import BUNDLED_TARGET, LocalModel, resolve_reference
from transformers import AutoConfig

from bench.peers.lineup import ALL_PEERS, Lineup, LineupOptions, build_request
from bench.peers.prompts import PromptMaker, choose_prompts
from bench.peers.table import Measured, format_table, summarise
from bench.results import BenchResult, describe_command, describe_machine, format_rows, write_result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peers.prompts import RagPrompt

DEFAULT_LOGS = Path(".specrag/bench/peers")
DEFAULT_CACHE = Path("~/.cache/specrag/models")
WARM_UP_TOKENS = 8


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peers", nargs="+", choices=ALL_PEERS, default=ALL_PEERS[:-1])
    parser.add_argument("--vllm-python", default="python")
    parser.add_argument("--llama-python", default="python")
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=DEFAULT_CACHE)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=1700)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--drafters", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--logs", type=Path, default=DEFAULT_LOGS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--answers", type=Path, help="every answer, as JSON")
    return parser.parse_args()


def make_prompts(arguments: argparse.Namespace) -> list[RagPrompt]:
    """Return the prompts, those for warming up behind the measured ones."""
    cache_dir = arguments.model_cache.expanduser()
    folder = load_folder(arguments.model, cache_dir)[1]
    maker = PromptMaker(
        load_tokenizer(arguments.model, cache_dir),
        max_tokens=arguments.max_tokens,
        max_model_len=AutoConfig.from_pretrained(folder).max_position_embeddings,
    )
    return choose_prompts(
        arguments.data,
        maker,
        num_prompts=arguments.prompts + 1,
        about_tokens=arguments.prompt_tokens,
        num_drafters=arguments.drafters,
    )


def build_lineup(arguments: argparse.Namespace) -> Lineup:
    """Return the peers' start options."""
    source = resolve_reference(arguments.model)
    assert isinstance(source, LocalModel), "peers are measured on a model of this machine"
    cache_dir = arguments.model_cache.expanduser()
    return Lineup(
        LineupOptions(
            folder=load_folder(arguments.model, cache_dir)[1],
            gguf=source.path,
            reference=arguments.model,
            cache_dir=cache_dir,
            threads=arguments.threads,
            vllm_python=arguments.vllm_python,
            llama_python=arguments.llama_python,
            logs=arguments.logs.resolve(),
        )
    )


def measure_prompt(
    lineup: Lineup, peers: Sequence[str], prompt: RagPrompt, *, max_tokens: int
) -> list[Measured]:
    """Send one prompt to all peers, one after the other."""
    measured = []
    for peer in peers:
        answer = lineup.get(peer).ask(build_request(peer, prompt, max_tokens=max_tokens))
        one = Measured(
            peer=peer,
            question_id=prompt.question.question_id,
            num_prompt_tokens=len(prompt.token_ids),
            answer=answer,
        )
        print(one.describe(), flush=True)
        measured.append(one)
    return measured


def measure_all(
    lineup: Lineup, peers: Sequence[str], prompts: Sequence[RagPrompt], *, max_tokens: int
) -> list[Measured]:
    """Warm up with the last prompt, then measure the others."""
    measure_prompt(lineup, peers, prompts[-1], max_tokens=min(WARM_UP_TOKENS, max_tokens))
    measured = []
    for idx, prompt in enumerate(prompts[:-1]):
        shift = idx % len(peers)
        order = [*peers[shift:], *peers[:shift]]
        measured += measure_prompt(lineup, order, prompt, max_tokens=max_tokens)
    return measured


def main() -> None:
    """Start the peers, measure, print the table."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a halted peer would stay for ever
    arguments = parse_arguments()
    prompts = make_prompts(arguments)
    lineup = build_lineup(arguments)
    peers = list(arguments.peers)
    try:
        lineup.start(peers)
        measured = measure_all(lineup, peers, prompts, max_tokens=arguments.max_tokens)
    finally:
        lineup.stop()
    print(format_table(measured))
    rows = summarise(measured)
    print(format_rows(rows))
    if arguments.answers:
        arguments.answers.write_text(json.dumps([asdict(one) for one in measured]))
    if arguments.out:
        conditions = (
            f"{arguments.model}, bf16, {arguments.threads} threads, {arguments.prompts} prompts of "
            f"about {arguments.prompt_tokens} tokens, {arguments.max_tokens} new tokens, greedy; "
            f"{describe_machine()}"
        )
        command = describe_command("bench.peers")
        result = BenchResult(name="peers", rows=rows, command=command, conditions=conditions)
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
