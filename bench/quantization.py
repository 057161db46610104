"""What int8 weights cost and save: memory, passes of few tokens, agreement on real prompts.

Usage: python -m bench.quantization [--model REFERENCE] [--prompts 20] [--out RESULT.json]

Both models stand in one process and take turns. The pass is timed with the runner the engine uses,
behind a cached context. Agreement: both models read the handbook's prompts and the unquantised
one's greedy answers; how often their most likely next tokens are the same over the answers.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from specrag_inference.attention.step import Segment, StepInputs
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.models.loading import load_model, load_tokenizer
from specrag_inference.models.quantization import count_weight_bytes
from specrag_inference.models.reference import BUNDLED_TARGET
from specrag_inference.runner import ModelRunner, TokenVocabulary

from bench.engine_driver import EngineDriver
from bench.forward_paths import ForwardPaths
from bench.peers.prompts import PromptMaker
from bench.question_sets import load_handbook
from bench.results import (
    BenchResult,
    ResultRow,
    describe_command,
    describe_machine,
    format_rows,
    write_result,
)

if TYPE_CHECKING:
    from specrag_inference.models.loading import LoadedModel
    from specrag_inference.plan import QuantizationName
    from transformers import PreTrainedTokenizerBase

NAMES: Final[tuple[QuantizationName, ...]] = ("none", "int8")
CONTEXT: Final = 512
SIZES: Final = (1, 8, 32)
ROUNDS: Final = 15
BLOCK_SIZE: Final = 16
MIB: Final = 1024 * 1024


def build_pass(num_cached: int, num_tokens: int) -> StepInputs:
    """Return a pass of one chain behind ``num_cached`` tokens."""
    positions = np.arange(num_cached, num_cached + num_tokens)
    segment = Segment(
        num_cached=num_cached,
        num_chain=num_tokens,
        tree=None,
        slot_runs=((0, num_cached + num_tokens),),
    )
    return StepInputs(
        token_ids=positions + 1000,
        position_ids=positions,
        slot_ids=positions,
        logit_rows=np.arange(num_tokens),
        segments=(segment,),
    )


def time_passes(
    models: dict[QuantizationName, LoadedModel], tokenizer: PreTrainedTokenizerBase
) -> list[ResultRow]:
    """Return the median pass of every size, models taking turns."""
    runners = {}
    for name, model in models.items():
        vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), model.vocab_size)
        runners[name] = ModelRunner(model, vocabulary, num_blocks=64, block_size=BLOCK_SIZE)
        runners[name].execute(build_pass(0, CONTEXT))
    rows = []
    for size in SIZES:
        times: dict[QuantizationName, list[float]] = {name: [] for name in runners}
        for _ in range(ROUNDS):
            for name, runner in runners.items():
                started = time.perf_counter()
                runner.execute(build_pass(CONTEXT, size))
                times[name].append((time.perf_counter() - started) * 1000)
        rows += [
            ResultRow(
                what=f"pass of {size} tokens, {name}", value=statistics.median(taken), unit="ms"
            )
            for name, taken in times.items()
        ]
    return rows


def count_agreement(
    models: dict[QuantizationName, LoadedModel],
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    max_tokens: int,
) -> float:
    """Return the share of answer positions where both models' most likely tokens are the same."""
    exact = models["none"]
    maker = PromptMaker(tokenizer, max_tokens=max_tokens, max_model_len=exact.max_model_len)
    questions = load_handbook(num_passages=3)[:num_prompts]
    engine = Engine(exact, tokenizer, EngineConfig(num_blocks=256))
    driver = EngineDriver(engine)
    paths = {name: ForwardPaths(model, tokenizer) for name, model in models.items()}
    same = total = 0
    for index, question in enumerate(questions):
        prompt_ids = maker.build_target(question)
        driver.open(f"q{index}", prompt_ids, max_tokens=max_tokens)
        answer = driver.decode(f"q{index}", max_tokens)
        driver.free(f"q{index}")
        choices = [
            path.compute_logits(prompt_ids, answer, group=max_tokens).argmax(axis=-1)
            for path in paths.values()
        ]
        same += int((choices[0] == choices[1]).sum())
        total += len(choices[0])
        print(f"{index + 1} of {len(questions)} prompts: {same / total:.4f}", flush=True)
    return same / total


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=Path(".specrag/models"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = load_tokenizer(arguments.model, arguments.model_cache)
    models = {
        name: load_model(
            arguments.model, dtype="bf16", cache_dir=arguments.model_cache, quantization=name
        )
        for name in NAMES
    }
    rows = [
        ResultRow(what=f"weights, {name}", value=count_weight_bytes(model.module) / MIB, unit="MiB")
        for name, model in models.items()
    ]
    rows += time_passes(models, tokenizer)
    if arguments.prompts:
        agreement = count_agreement(models, tokenizer, arguments.prompts, arguments.max_tokens)
        rows.append(ResultRow(what="most likely next token is the same", value=agreement))
    print(format_rows(rows))
    if arguments.out is not None:
        conditions = f"{arguments.model}, bf16, {arguments.threads} threads; {describe_machine()}"
        command = describe_command("bench.quantization")
        result = BenchResult(
            name="quantization", rows=tuple(rows), command=command, conditions=conditions
        )
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
