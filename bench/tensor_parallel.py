"""One rank against three: the same greedy tokens, what a pass costs, and a rank that is killed.

Usage: python -m bench.tensor_parallel [--data FOLDER] [--prompts 50] [--dtype bf16] [--out R.json]

Every prompt is answered by an engine process of one rank and by one of ``--tp-size`` ranks, both on
the same threads in all, ``--at-once`` prompts side by side. Prompts are the example handbook's
questions over three, six and two passages; with ``--data``, whose folder holds ``hotpotqa.jsonl``,
half of them are HotpotQA's. Where answers differ, both tokens' prefixes are re-scored in fp32 as
``bench.near_ties`` does. At the end one rank is killed while the engine decodes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psutil
from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine_config import EngineConfig
from specrag_inference.messages import (
    EngineCrashed,
    EngineReady,
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    SequenceOpened,
    VerifyTree,
)
from specrag_inference.models.loading import load_model, load_tokenizer
from specrag_inference.models.reference import BUNDLED_TARGET
from specrag_inference.plan import EnginePlan
from specrag_inference.prompts import ChatTokenizer, PromptBuilder
from specrag_inference.serve import run_engine

from bench.forward_paths import ForwardPaths
from bench.near_ties import MAX_MARGIN_RATIO, PREFIX_GROUP, ROUND_TOKENS
from bench.question_sets import load_handbook, load_questions
from bench.results import (
    BenchResult,
    ResultRow,
    at_most,
    describe_command,
    describe_machine,
    format_rows,
    write_result,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_inference.plan import DtypeName

    from bench.question_sets import ClosedQuestion

START_S: Final = 300.0
REPLY_S: Final = 120.0
KILL_LIMIT_S: Final = 10.0


@dataclass(slots=True)
class Answers:
    """What one engine answered, and how long its passes took."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    seconds: float = 0.0
    pass_ms: list[float] = field(default_factory=list)


class EngineProcess:
    """An engine in a process of its own."""

    def __init__(self, plan: EnginePlan) -> None:
        """Start it and wait for the model."""
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=run_engine, args=(theirs, plan))
        self.process.start()
        theirs.close()
        first = self.receive(START_S)
        if not isinstance(first, EngineReady):
            raise SystemExit(f"the engine did not start: {first}")

    def receive(self, timeout_s: float = REPLY_S) -> Any:
        """Return the next message."""
        if not self.connection.poll(timeout_s):
            raise SystemExit(f"the engine process said nothing for {timeout_s:g} s")
        return self.connection.recv()

    def answer(
        self, prompts: dict[str, tuple[int, ...]], max_tokens: int, answers: Answers
    ) -> None:
        """Answer prompts side by side."""
        started = time.perf_counter()
        for name, prompt_ids in prompts.items():
            answers.token_ids[name] = []
            self._open(name, prompt_ids, max_tokens)
        unfinished = set(prompts)
        while unfinished:
            for event in self.receive():
                name = event.sequence_id
                if isinstance(event, SequenceOpened):
                    self._decode(name, max_tokens)
                    continue
                assert isinstance(event, RoundVerified), event
                answers.token_ids[name] += [token.token_id for token in event.tokens]
                answers.pass_ms.append(event.forward_s * 1000)
                if event.finish_reason is not None:
                    unfinished.discard(name)
                    self.connection.send(FreeSequence(sequence_id=name))
        answers.seconds += time.perf_counter() - started

    def kill_one_rank(self, prompt_ids: tuple[int, ...]) -> tuple[float, str, int | None]:
        """Kill the last rank while the engine decodes; return seconds to the end, words, code."""
        self._open("killed", prompt_ids, 1000)
        while not isinstance(self.receive()[-1], SequenceOpened):
            pass
        self._decode("killed", 1000)
        self.receive()
        children = psutil.Process(self.process.pid).children()
        ranks = [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]
        ranks[-1].kill()
        killed_at = time.perf_counter()
        message = ""
        try:
            while not message:
                reply = self.receive()
                message = reply.message if isinstance(reply, EngineCrashed) else ""
        except EOFError:
            message = "no word"
        self.process.join(REPLY_S)
        return time.perf_counter() - killed_at, message, self.process.exitcode

    def stop(self) -> None:
        """End it."""
        self.connection.send(None)
        self.process.join(REPLY_S)

    def _open(self, name: str, prompt_ids: tuple[int, ...], max_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=max_tokens)
        self.connection.send(
            OpenSequence(sequence_id=name, prompt_token_ids=prompt_ids, sampling=sampling)
        )

    def _decode(self, name: str, max_tokens: int) -> None:
        self.connection.send(
            VerifyTree(
                sequence_id=name, round=0, tree=TokenTree.empty(), free_run_tokens=max_tokens
            )
        )


class Judge:
    """Says whether two tokens were nearly tied where two answers part."""

    def __init__(self, model: str, cache_dir: Path, dtype: DtypeName) -> None:
        """Load the model in fp32 and in the precision that was measured."""
        tokenizer = load_tokenizer(model, cache_dir)
        self._exact, self._used = (
            ForwardPaths(load_model(model, dtype=name, cache_dir=cache_dir), tokenizer)
            for name in ("fp32", dtype)
        )

    def judge(self, prompt_ids: tuple[int, ...], ours: list[int], reference: list[int]) -> bool:
        """Print margin and numerics; return whether the difference is a near-tie."""
        position = next(i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b)
        prefix = reference[:position]
        row = self._exact.compute_logits(prompt_ids, prefix, group=PREFIX_GROUP)[-1]
        margin = float(abs(row[ours[position]] - row[reference[position]]))
        single = self._used.compute_logits(prompt_ids, reference, group=1)
        grouped = self._used.compute_logits(prompt_ids, reference, group=ROUND_TOKENS)
        numerics = float(np.abs(single - grouped).max())
        is_tie = margin <= MAX_MARGIN_RATIO * numerics
        print(
            f"  position={position:3} margin_fp32={margin:.4f} numerics={numerics:.4f} "
            f"{'near-tie' if is_tie else 'FAULT'}"
        )
        return is_tie


def load_prompts(arguments: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    """Return prompts by name."""
    questions: list[tuple[str, ClosedQuestion]] = []
    num_own = arguments.prompts
    if arguments.data is not None:
        num_own //= 2
        found = load_questions(arguments.data, "hotpotqa", limit=arguments.prompts - num_own)
        questions += [(f"hotpotqa-{question.question_id}", question) for question in found]
    own = [
        (f"handbook-{num_passages}-{question.question_id}", question)
        for num_passages in (3, 6, 2)
        for question in load_handbook(num_passages=num_passages)
    ]
    tokenizer = load_tokenizer(arguments.model, arguments.model_cache)
    builder = PromptBuilder(ChatTokenizer.from_transformers(tokenizer), max_model_len=2048)
    return {
        name: _build_prompt(builder, question, arguments.max_tokens)
        for name, question in [*own[:num_own], *questions]
    }


def _build_prompt(
    builder: PromptBuilder, question: ClosedQuestion, max_tokens: int
) -> tuple[int, ...]:
    passages = tuple(
        PromptPassage(number=number, title=passage.title, text=passage.text)
        for number, passage in enumerate(question.passages, 1)
    )
    turn = ConversationTurn(passages=passages, question=question.question)
    return builder.build(Conversation(turns=(turn,)), max_tokens=max_tokens).token_ids


def measure(
    arguments: argparse.Namespace, prompts: dict[str, tuple[int, ...]], tp_size: int
) -> tuple[Answers, EngineProcess]:
    """Answer all prompts on ``tp_size`` ranks; the engine goes on running."""
    engine = EngineProcess(
        EnginePlan(
            model=arguments.model,
            cache_dir=arguments.model_cache,
            dtype=arguments.dtype,
            num_threads=arguments.threads,
            tp_size=tp_size,
            engine=EngineConfig(num_blocks=160 * arguments.at_once),
        )
    )
    answers = Answers()
    names = list(prompts)
    for start in range(0, len(names), arguments.at_once):
        group = {name: prompts[name] for name in names[start : start + arguments.at_once]}
        engine.answer(group, arguments.max_tokens, answers)
        print(f"tp_size={tp_size}: {start + len(group)} of {len(names)}", flush=True)
    return answers, engine


def compare(arguments: argparse.Namespace) -> list[ResultRow]:
    """Run both degrees and the kill; return the figures."""
    prompts = load_prompts(arguments)
    single, engine = measure(arguments, prompts, 1)
    engine.stop()
    split, engine = measure(arguments, prompts, arguments.tp_size)
    killed_s, message, exit_code = engine.kill_one_rank(next(iter(prompts.values())))
    differing = [name for name in prompts if single.token_ids[name] != split.token_ids[name]]
    faults = judge_all(arguments, prompts, single, split, differing) if differing else 0
    return [
        ResultRow(what="prompts", value=len(prompts)),
        ResultRow(what="answers with the same tokens", value=len(prompts) - len(differing)),
        at_most("differing answers that are no near-ties", faults, 0),
        ResultRow(what="median pass, one rank", value=_median(single.pass_ms), unit="ms"),
        ResultRow(
            what=f"median pass, {arguments.tp_size} ranks", value=_median(split.pass_ms), unit="ms"
        ),
        ResultRow(what="all answers, one rank", value=single.seconds, unit="s"),
        ResultRow(what=f"all answers, {arguments.tp_size} ranks", value=split.seconds, unit="s"),
        at_most("a rank is killed: end of the replica after", killed_s, KILL_LIMIT_S, "s"),
        at_most("its exit code is 1: difference", abs((exit_code or 0) - 1), 0),
        ResultRow(what="its last words", value=message),
    ]


def judge_all(
    arguments: argparse.Namespace,
    prompts: dict[str, tuple[int, ...]],
    single: Answers,
    split: Answers,
    differing: Sequence[str],
) -> int:
    """Judge every differing answer; return how many are no near-ties."""
    judge = Judge(arguments.model, arguments.model_cache, arguments.dtype)
    faults = 0
    for name in differing:
        print(name)
        faults += not judge.judge(prompts[name], split.token_ids[name], single.token_ids[name])
    return faults


def _median(values: Sequence[float]) -> float:
    return float(np.median(values))


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tp-size", type=int, default=3)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=Path(".specrag/models"))
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> int:
    """Measure, print, write; returns 1 when a bar is missed."""
    arguments = parse_arguments()
    rows = tuple(compare(arguments))
    result = BenchResult(
        name="tensor_parallel",
        rows=rows,
        command=describe_command("bench.tensor_parallel"),
        conditions=(
            f"{arguments.model}, {arguments.dtype}, {arguments.threads} threads in all, gloo, "
            f"{arguments.at_once} prompts at once, {arguments.max_tokens} tokens; "
            f"{describe_machine()}"
        ),
    )
    print(format_rows(rows))
    if arguments.out is not None:
        write_result(arguments.out, result)
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(main())
