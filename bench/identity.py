"""What must not change an answer: a draft model that is the target, cancelled neighbours, a cache.

Usage: python -m bench.identity [--model REFERENCE] [--tokens 2000] [--cancels 200] [--out R.json]

All in fp32, greedy, over the example handbook, on the engine itself:

- the draft model is the target: how much of what it proposes is accepted;
- ``--cancels`` sequences over the same passages come and are cancelled at any point while four
  others decode: their tokens against those alone, and the cache blocks behind it all;
- a second question over the same passages: what it prefills, and its answer against a cold one's.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import DraftProposal
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import (
    ProposeTokens,
    RoundVerified,
    SequenceOpened,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.models.loading import load_model, load_tokenizer
from specrag_inference.models.reference import BUNDLED_TARGET

from bench.engine_driver import EngineDriver
from bench.peers.prompts import PromptMaker
from bench.question_sets import load_handbook
from bench.results import (
    BenchResult,
    ResultRow,
    at_least,
    describe_command,
    describe_machine,
    format_rows,
    write_result,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.question_sets import ClosedQuestion

NUM_PASSAGES = 2
GAMMA = 8
SELF_DRAFT_ANSWER_TOKENS = 126
BYSTANDERS = 4
BYSTANDER_TOKENS = 48
MAX_STORM_SEQUENCES = 8
BLOCK_SIZE = 16
SEED = 7

Prompt = tuple[int, ...]


def measure_self_drafting(
    driver: EngineDriver, prompts: Sequence[Prompt], *, num_tokens: int
) -> list[ResultRow]:
    """Draft with the target itself until ``num_tokens`` were proposed."""
    num_proposed = num_accepted = 0
    for number, prompt_ids in enumerate(prompts):
        if num_proposed >= num_tokens:
            break
        proposed, accepted = _draft_answer(driver, f"self-{number}", prompt_ids)
        num_proposed += proposed
        num_accepted += accepted
    what = f"draft model = target: accepted of {num_proposed} proposed tokens"
    return [at_least(what, 100 * num_accepted / num_proposed, 100, "%")]


def _draft_answer(driver: EngineDriver, name: str, prompt_ids: Prompt) -> tuple[int, int]:
    """Return proposed and accepted tokens of one answer."""
    target, drafter = f"{name}-target", f"{name}-drafter"
    for sequence_id in (target, drafter):
        driver.open(sequence_id, prompt_ids, max_tokens=SELF_DRAFT_ANSWER_TOKENS + GAMMA)
    num_proposed = num_accepted = num_answered = round_number = 0
    committed: list[int] = []
    while num_answered < SELF_DRAFT_ANSWER_TOKENS:
        driver.engine.submit(
            ProposeTokens(
                sequence_id=drafter,
                round=round_number,
                committed_token_ids=tuple(committed),
                gamma=GAMMA,
            )
        )
        branches = driver.wait(drafter, TokensProposed).branches
        proposal = DraftProposal(
            drafter_index=0, committed_length=num_answered, branches=branches, gamma=GAMMA
        )
        tree = merge_proposals([proposal], max_draft_tokens=GAMMA)
        committed = driver.verify(target, tree, round_number=round_number)
        num_proposed += tree.num_nodes
        num_accepted += len(committed) - 1
        num_answered += len(committed)
        round_number += 1
    driver.free(target)
    driver.free(drafter)
    return num_proposed, num_accepted


def measure_cancel_storm(
    driver: EngineDriver, prompts: Sequence[Prompt], *, num_cancels: int
) -> list[ResultRow]:
    """Let sequences come and go around four that decode."""
    calm = [_decode_alone(driver, f"calm-{idx}", prompts[idx]) for idx in range(BYSTANDERS)]
    num_free = driver.engine.stats().num_free_blocks
    stormy = _decode_in_storm(driver, prompts, num_cancels)
    driver.engine.check_integrity()
    num_same = sum(one == other for one, other in zip(calm, stormy, strict=True))
    lost = num_free - driver.engine.stats().num_free_blocks
    return [
        ResultRow(
            what=f"{num_cancels} cancels: bystanders token-identical",
            value=f"{num_same} of {BYSTANDERS}",
            bar="all",
            holds=num_same == BYSTANDERS,
        ),
        ResultRow(
            what=f"{num_cancels} cancels: blocks not given back",
            value=lost,
            bar="0",
            holds=lost == 0,
        ),
    ]


def _decode_alone(driver: EngineDriver, sequence_id: str, prompt_ids: Prompt) -> list[int]:
    driver.open(sequence_id, prompt_ids, max_tokens=BYSTANDER_TOKENS)
    token_ids = driver.decode(sequence_id, BYSTANDER_TOKENS)
    driver.free(sequence_id)
    return token_ids


def _decode_in_storm(
    driver: EngineDriver, prompts: Sequence[Prompt], num_cancels: int
) -> list[list[int]]:
    """Return the bystanders' tokens; every storm sequence is freed after a random few steps."""
    rng = random.Random(SEED)
    names = [f"bystander-{idx}" for idx in range(BYSTANDERS)]
    answers: dict[str, list[int]] = {name: [] for name in names}
    for idx, name in enumerate(names):
        driver.begin(name, prompts[idx], max_tokens=BYSTANDER_TOKENS)
    left = num_cancels
    storm: dict[str, int] = {}
    while left or storm or any(len(ids) < BYSTANDER_TOKENS for ids in answers.values()):
        while left and len(storm) < MAX_STORM_SEQUENCES:
            name = f"storm-{left}"
            driver.begin(name, rng.choice(prompts), max_tokens=BYSTANDER_TOKENS)
            storm[name] = rng.randrange(4)
            left -= 1
        driver.step()
        for name in names:
            _go_on(driver, name, answers[name])
        for name in list(storm):
            if driver.take(name, SequenceOpened):
                _ask(driver, name, free_run=8)
            storm[name] -= 1
            if storm[name] < 0:
                driver.free(name)
                del storm[name]
    for name in names:
        driver.free(name)
    return [answers[name] for name in names]


def _go_on(driver: EngineDriver, name: str, answer: list[int]) -> None:
    """Start a bystander once it is open; collect what it was told."""
    if driver.take(name, SequenceOpened):
        _ask(driver, name, free_run=BYSTANDER_TOKENS - 1)
    while verified := driver.take(name, RoundVerified):
        answer += [token.token_id for token in verified[0].tokens]


def _ask(driver: EngineDriver, name: str, *, free_run: int) -> None:
    driver.engine.submit(
        VerifyTree(sequence_id=name, round=0, tree=TokenTree.empty(), free_run_tokens=free_run)
    )


def measure_prefix_reuse(driver: EngineDriver, first: Prompt, second: Prompt) -> list[ResultRow]:
    """Ask two questions over the same passages, and the second one cold."""
    common = next(idx for idx, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    opened, cold = _answer(driver, "cold", second, b"cold")
    _answer(driver, "first", first, b"warm")
    reopened, warm = _answer(driver, "second", second, b"warm")
    num_computed = len(second) - reopened.num_cached_tokens
    num_needed = len(second) - common
    return [
        ResultRow(what="second question: tokens of its prompt", value=len(second)),
        ResultRow(what="second question: of these shared with the first", value=common),
        ResultRow(what="second question: taken from the cache", value=reopened.num_cached_tokens),
        ResultRow(
            what="second question: tokens prefilled",
            value=num_computed,
            bar=f"< {num_needed} that differ + a block of {BLOCK_SIZE}",
            holds=num_computed < num_needed + BLOCK_SIZE,
        ),
        ResultRow(
            what="second question: prefill, cold / warm",
            value=opened.prefill_s / reopened.prefill_s,
            unit="x",
        ),
        ResultRow(
            what="second question: answer",
            value="same as cold" if warm == cold else "another than cold",
            bar="same as cold",
            holds=warm == cold,
        ),
    ]


def _answer(
    driver: EngineDriver, name: str, prompt_ids: Prompt, scope: bytes
) -> tuple[SequenceOpened, list[int]]:
    opened = driver.open(name, prompt_ids, max_tokens=BYSTANDER_TOKENS, cache_scope=scope)
    token_ids = driver.decode(name, BYSTANDER_TOKENS)
    driver.free(name)
    return opened, token_ids


def _make_shared(maker: PromptMaker, questions: Sequence[ClosedQuestion]) -> list[Prompt]:
    """Return the prompts of different questions over the first one's passages."""
    shared = questions[0]
    return [maker.build_over(shared, one.question) for one in questions]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=Path("~/.cache/specrag/models"))
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--cancels", type=int, default=200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cache_dir = arguments.model_cache.expanduser()
    tokenizer = load_tokenizer(arguments.model, cache_dir)
    model = load_model(
        arguments.model, dtype="fp32", cache_dir=cache_dir, num_threads=arguments.threads
    )
    endless = replace(model, eos_token_ids=frozenset())
    engine = Engine(endless, tokenizer, EngineConfig(num_blocks=1024, block_size=BLOCK_SIZE))
    driver = EngineDriver(engine)
    maker = PromptMaker(
        tokenizer, max_tokens=SELF_DRAFT_ANSWER_TOKENS, max_model_len=model.max_model_len
    )
    questions = load_handbook(num_passages=NUM_PASSAGES)
    own = [maker.build_target(question) for question in questions]
    shared = _make_shared(maker, questions[:8])
    rows: list[ResultRow] = []
    for measure in (
        partial(measure_prefix_reuse, driver, shared[0], shared[1]),
        partial(measure_cancel_storm, driver, shared, num_cancels=arguments.cancels),
        partial(measure_self_drafting, driver, own, num_tokens=arguments.tokens),
    ):
        fresh = measure()
        print(format_rows(fresh), flush=True)
        rows += fresh
    if arguments.out:
        result = BenchResult(
            name="identity",
            rows=tuple(rows),
            command=describe_command("bench.identity"),
            conditions=f"{arguments.model}, fp32, greedy, handbook; {describe_machine()}",
        )
        write_result(arguments.out, result)


if __name__ == "__main__":
    main()
