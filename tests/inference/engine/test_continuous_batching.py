"""One pass serves everything that is due, and everybody moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from specrag_inference.engine import Engine
from specrag_inference.engine_stats import WorkKind
from specrag_inference.messages import RoundVerified, SequenceOpened, TokensProposed, TreeScored
from specrag_inference.testing import build_random_model, drain

from tests.inference.engine.commands import (
    decode_command,
    draw_tokens,
    list_tokens,
    open_command,
    propose_command,
    score_chain_command,
    verify_command,
)

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]


def test_all_kinds_of_work_ride_one_pass_and_get_what_they_get_alone(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    engine = build_engine(max_step_tokens=256, max_shared_prefill_tokens=96)
    prompts = {name: draw_tokens(index, 30) for index, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        engine.submit(open_command(name, prompt))
    drain(engine)
    truths = {name: generate_reference(prompt, 8) for name, prompt in prompts.items()}
    chain = draw_tokens(9, 20)
    engine.submit(score_chain_command("d", chain))
    (alone,) = drain(engine)
    before = engine.stats().batches
    engine.submit(verify_command("a", truths["a"][:4], [7, 7]))
    engine.submit(decode_command("b", 1))
    engine.submit(propose_command("c", gamma=1))
    engine.submit(score_chain_command("d", chain))
    engine.submit(open_command("e", draw_tokens(8, 40)))
    events = engine.step()
    done = engine.stats().batches - before
    assert done.num_passes == 1
    assert done.num_shares == 5
    assert done.num_tokens == {
        WorkKind.TREE: 1 + 6,
        WorkKind.DECODE: 1,
        WorkKind.DRAFT: 1,
        WorkKind.SCORE: 1 + 19,
        WorkKind.PREFILL: 39,
    }
    assert list_tokens(events, "a") == truths["a"][:5]
    assert list_tokens(events, "b") == truths["b"][:1]
    by_kind = {type(event): event for event in events}
    proposed, scored = by_kind[TokensProposed], by_kind[TreeScored]
    assert isinstance(proposed, TokensProposed)
    assert list(proposed.branches[0].token_ids) == truths["c"][:1]
    assert isinstance(scored, TreeScored)
    assert isinstance(alone, TreeScored)
    np.testing.assert_allclose(scored.logprobs, alone.logprobs, atol=1e-3)
    assert isinstance(by_kind[SequenceOpened], SequenceOpened)
    loads = {event.load for event in events if isinstance(event, RoundVerified)}
    assert loads == {(68, 5)}
    assert engine.stats().batches.mean_pass_tokens > 0


def test_statistics_count_queues_and_blocks(build_engine: BuildEngine) -> None:
    engine = build_engine(max_sequences=2)
    for name in ("a", "b", "c"):
        engine.submit(open_command(name, draw_tokens(ord(name), 40)))
    drain(engine)
    for _ in range(3):
        engine.submit(decode_command("a", 4))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pending_jobs) == (2, 1, 3)
    assert stats.num_used_blocks == 6
    assert stats.num_free_blocks == stats.num_blocks - 6
    assert stats.oldest_wait_s > 0
    engine.close()
    assert engine.stats().num_cached_blocks == 4
    assert engine.stats().oldest_wait_s == 0


@pytest.mark.parametrize("with_prefill", [False, True])
def test_sixteen_sequences_progress_equally(build_engine: BuildEngine, with_prefill: bool) -> None:
    engine = build_engine(num_blocks=256, max_step_tokens=8, max_shared_prefill_tokens=4)
    names = [f"s{number}" for number in range(16)]
    for number, name in enumerate(names):
        engine.submit(
            open_command(name, draw_tokens(number, 10 + 3 * number), max_tokens=99, min_tokens=99)
        )
    drain(engine)
    for name in names:
        engine.submit(decode_command(name, 99))
    if with_prefill:
        engine.submit(open_command("prompt", draw_tokens(99, 70)))
    num_served = dict.fromkeys(names, 0)
    last_served = dict.fromkeys(names, 0)
    longest_wait = 0
    for step in range(1, 61):
        for name in {event.sequence_id for event in engine.step()} & set(names):
            longest_wait = max(longest_wait, step - last_served[name])
            last_served[name] = step
            num_served[name] += 1
    assert max(num_served.values()) - min(num_served.values()) <= 1
    assert longest_wait <= 5
    if with_prefill:
        assert not engine._roster["prompt"].is_opening


def test_preempted_sequences_come_back_without_chasing_each_other(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    engine = build_engine(num_blocks=20)
    prompts = {f"s{number}": draw_tokens(20 + number, 40) for number in range(6)}
    for name, prompt in prompts.items():
        engine.submit(open_command(name, prompt, max_tokens=70))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, SequenceOpened):
                engine.submit(decode_command(event.sequence_id, 70))
            tokens[event.sequence_id] += list_tokens([event])
        engine.check_integrity()
    assert tokens == {name: generate_reference(prompt, 70) for name, prompt in prompts.items()}
    stats = engine.stats()
    assert 0 < stats.num_preemptions <= 12
    # Each token is computed once, and what was lost at most twice more.
    assert stats.batches.num_tokens[WorkKind.PREFILL] < 3 * 6 * 110


@pytest.mark.parametrize("length", [14, 15, 16, 17, 31, 32, 33, 47, 48, 49])
@pytest.mark.parametrize("num_draft", [1, 15, 16, 17, 33])
def test_tree_of_one_chain_equals_decoding_at_every_block_edge(
    build_engine: BuildEngine, generate_reference: GenerateReference, length: int, num_draft: int
) -> None:
    prompt = draw_tokens(1, length)
    truth = generate_reference(prompt, num_draft + 2)
    engine = build_engine()
    engine.submit(open_command("a", prompt))
    drain(engine)
    wrong = [*truth[: num_draft // 2], (truth[num_draft // 2] + 1) % 256]
    engine.submit(verify_command("a", wrong, truth[:num_draft]))
    engine.submit(decode_command("a", 1))
    assert list_tokens(drain(engine)) == truth


@pytest.mark.parametrize("length", [15, 16, 17, 40])
def test_moved_keys_and_values_serve_as_recomputed_ones_do(
    build_engine: BuildEngine, generate_reference: GenerateReference, length: int
) -> None:
    prompt = draw_tokens(2, length)
    truth = generate_reference(prompt, 12)
    branches = [
        [*truth[:kept], *((token + 1) % 256 for token in truth[kept : kept + 2])]
        for kept in range(10)
    ]
    warm, cold = build_engine(), build_engine()
    warm.submit(open_command("a", prompt))
    drain(warm)
    warm.submit(verify_command("a", *branches, truth[:11]))
    assert list_tokens(drain(warm)) == truth
    cold.submit(open_command("a", (*prompt, *truth)))
    drain(cold)
    chain = draw_tokens(3, 30)
    scores = []
    for engine in (warm, cold):
        engine.submit(score_chain_command("a", chain))
        (scored,) = drain(engine)
        assert isinstance(scored, TreeScored)
        scores.append(scored.logprobs)
    np.testing.assert_allclose(scores[0], scores[1], atol=1e-4)


def test_second_question_over_cached_passages_prefills_only_what_differs(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    passages = draw_tokens(4, 300)
    first, second = ((*passages, *draw_tokens(seed, 25)) for seed in (5, 6))
    engine = build_engine()
    engine.submit(open_command("first", first))
    drain(engine)
    before = engine.stats().batches
    engine.submit(open_command("second", second))
    (opened,) = drain(engine)
    assert isinstance(opened, SequenceOpened)
    assert opened.num_cached_tokens == 288
    done = engine.stats().batches - before
    assert done.num_tokens[WorkKind.PREFILL] == 325 - 1 - 288
    engine.submit(decode_command("second", 20))
    assert list_tokens(drain(engine)) == generate_reference(second, 20)


@pytest.mark.slow
def test_drafter_equal_to_the_target_is_accepted_over_two_thousand_tokens(
    build_engine: BuildEngine,
) -> None:
    model = build_random_model("llama", seed=0, max_model_len=2200)
    target, drafter = (build_engine(model, num_blocks=160) for _ in range(2))
    prompt = draw_tokens(5, 70)
    law: dict[str, Any] = {"max_tokens": 2000, "min_tokens": 2000}
    for engine in (target, drafter):
        engine.submit(open_command("a", prompt, **law))
        drain(engine)
    committed: tuple[int, ...] = ()
    tokens: list[int] = []
    num_accepted = num_drafted = 0
    while len(tokens) < 2000:
        drafter.submit(propose_command("a", gamma=7, committed=committed))
        (proposed,) = drain(drafter)
        assert isinstance(proposed, TokensProposed)
        branch = proposed.branches[0].token_ids
        target.submit(verify_command("a", branch))
        (round_,) = drain(target)
        assert isinstance(round_, RoundVerified)
        committed = tuple(token.token_id for token in round_.tokens)
        tokens += committed
        num_drafted += len(branch)
        num_accepted += sum(token.node_idx is not None for token in round_.tokens)
    assert (num_accepted, num_drafted) == (1750, 1750)
    target.submit(open_command("alone", prompt, **law))
    drain(target)
    target.submit(decode_command("alone", 2000))
    assert list_tokens(drain(target)) == tokens
