"""Records the traces that ``bench.merging`` replays.

Usage: python -m bench.merging.record --data FOLDER --target MODEL --drafter MODEL --traces FOLDER
       [--questions 20] [--max-tokens 64] [--time-limit SECONDS] [--with-best]

Target and drafter are two sizes of one family with one tokenizer. May be interrupted and started
again: what is recorded is kept. ``--with-best`` adds drafters that share the two passages most like
the question.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from specrag_inference.models.loading import load_model, load_tokenizer

from bench.merging.reading import PromptReader
from bench.merging.recording import Recorder, RecordingOptions
from bench.merging.subsets import NUMBERS_OF_DRAFTERS, split_by_number, split_with_best
from bench.peers.prompts import PromptMaker
from bench.question_sets import load_questions

if TYPE_CHECKING:
    from bench.question_sets import ClosedQuestion

MAX_SEQUENCE_TOKENS = 4096
REQUEST = "Explain in a few sentences how you know."


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=float("inf"))
    parser.add_argument("--with-best", action="store_true")
    parser.add_argument("--request", default=REQUEST, help="appended to every question")
    parser.add_argument("--model-cache", type=Path, default=Path("~/.cache/specrag/models"))
    return parser.parse_args()


def list_subsets(question: ClosedQuestion, *, with_best: bool) -> list[tuple[int, ...]]:
    """Return the passages of all drafters of a question, each set once."""
    num_passages = len(question.passages)
    subsets = [tuple(range(num_passages))]
    for num_drafters in NUMBERS_OF_DRAFTERS:
        subsets += split_by_number(num_passages, num_drafters)
    if with_best:
        subsets += split_with_best(question, max(NUMBERS_OF_DRAFTERS))
    return list(dict.fromkeys(subsets))


def main() -> None:
    """Record until done or out of time."""
    arguments = parse_arguments()
    ends_at = time.monotonic() + arguments.time_limit
    cache_dir = arguments.model_cache.expanduser()
    tokenizer = load_tokenizer(arguments.target, cache_dir)
    target, drafter = (
        load_model(reference, dtype="bf16", cache_dir=cache_dir, num_threads=arguments.threads)
        for reference in (arguments.target, arguments.drafter)
    )
    maker = PromptMaker(
        tokenizer, max_tokens=arguments.max_tokens, max_model_len=MAX_SEQUENCE_TOKENS
    )
    recorder = Recorder(
        PromptReader(target, tokenizer, max_tokens=MAX_SEQUENCE_TOKENS),
        PromptReader(drafter, tokenizer, max_tokens=MAX_SEQUENCE_TOKENS),
        maker.build,
        RecordingOptions(
            folder=arguments.traces,
            max_tokens=arguments.max_tokens,
            eos_token_ids=target.eos_token_ids,
            request=arguments.request,
            ends_at=ends_at,
        ),
    )
    questions = load_questions(arguments.data, "hotpotqa", limit=arguments.questions)
    for number, question in enumerate(questions):
        began = time.monotonic()
        subsets = list_subsets(question, with_best=arguments.with_best)
        if not recorder.record(question, subsets, number=number):
            print("out of time; run again to go on")
            return
        print(f"{number} {question.question_id}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
