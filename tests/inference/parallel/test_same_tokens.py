"""Several ranks commit the tokens that one rank commits: trees, prefixes, preemption, cancel."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    EngineReady,
    FreeSequence,
    OpenSequence,
    SamplingParams,
    SequenceOpened,
    VerifyTree,
)
from specrag_inference.testing import build_chain_branch, build_tree

from tests.inference.parallel.conftest import build_local_link, make_plan, save_model
from tests.inference.parallel.engine_links import LocalLink, ProcessLink, answer_all

if TYPE_CHECKING:
    from pathlib import Path

    from specrag_inference.testing import Family

pytestmark = [pytest.mark.integration, pytest.mark.congruence]

KEY = bytes(range(16))


def draw_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 256, length))


def opening(name: str, prompt: tuple[int, ...], *, max_tokens: int, **law: Any) -> OpenSequence:
    mode = law.pop("mode", VerificationMode.REJECTION)
    return OpenSequence(
        sequence_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=max_tokens, **law),
        mode=mode,
        random_key=KEY,
    )


def draw_trees(truth: list[int], *, seed: int, num_rounds: int) -> list[TokenTree]:
    """Branches of three drafters that follow ``truth`` from its start, then go astray."""
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(num_rounds):
        branches = []
        for drafter in range(3):
            right = truth[: int(rng.integers(0, 5))]
            astray = rng.integers(0, 256, int(rng.integers(1, 4))).tolist()
            branches.append((drafter, [build_chain_branch([*right, *astray])]))
        trees.append(build_tree(branches))
    return trees


def test_two_ranks_announce_the_model_of_one(two_ranks: ProcessLink) -> None:
    ready = two_ranks.first
    assert isinstance(ready, EngineReady)
    assert (ready.vocab_size, ready.dtype) == (259, "float32")
    assert len(two_ranks.find_ranks()) == 1


def test_greedy_answers_side_by_side_are_the_same(
    two_ranks: ProcessLink, one_rank: LocalLink
) -> None:
    openings = [opening(f"g{i}", draw_prompt(i, 3 + 20 * i), max_tokens=24) for i in range(4)]
    assert answer_all(two_ranks, openings) == answer_all(one_rank, openings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_verified_trees_commit_the_same_tokens(
    two_ranks: ProcessLink, one_rank: LocalLink, temperature: float
) -> None:
    law = {"temperature": temperature, "mode": VerificationMode.COUPLED}
    openings = [opening(f"t{temperature}", draw_prompt(9, 40), max_tokens=40, **law)]
    (truth,) = answer_all(one_rank, openings).values()
    trees = {openings[0].sequence_id: draw_trees(truth, seed=1, num_rounds=6)}
    assert answer_all(two_ranks, openings, trees) == {openings[0].sequence_id: truth}


def test_prefix_of_an_earlier_sequence_is_reused_with_the_same_tokens(
    two_ranks: ProcessLink, one_rank: LocalLink
) -> None:
    prompt = draw_prompt(11, 70)
    first = opening("p1", prompt, max_tokens=4)
    second = opening("p2", (*prompt, 7), max_tokens=12)
    answer_all(two_ranks, [first])
    two_ranks.submit(second)
    (opened,) = two_ranks.events()
    assert isinstance(opened, SequenceOpened)
    assert opened.num_cached_tokens >= 64
    two_ranks.submit(FreeSequence(sequence_id="p2"))
    again = opening("p3", second.prompt_token_ids, max_tokens=12)
    (tokens,) = answer_all(two_ranks, [again]).values()
    (expected,) = answer_all(one_rank, [second]).values()
    assert tokens == expected


def test_preempted_sequences_answer_the_same(two_ranks: ProcessLink, one_rank: LocalLink) -> None:
    openings = [opening(f"e{i}", draw_prompt(20 + i, 60), max_tokens=100) for i in range(4)]
    before = two_ranks.stats().num_preemptions
    tokens = answer_all(two_ranks, openings)
    assert two_ranks.stats().num_preemptions > before
    assert tokens == answer_all(one_rank, openings)


def test_cancelled_sequence_gives_its_blocks_back_and_disturbs_nobody(
    two_ranks: ProcessLink, one_rank: LocalLink
) -> None:
    doomed = opening("c-doomed", draw_prompt(30, 40), max_tokens=200)
    two_ranks.submit(doomed)
    two_ranks.events()
    two_ranks.submit(
        VerifyTree(sequence_id="c-doomed", round=0, tree=TokenTree.empty(), free_run_tokens=199)
    )
    two_ranks.events()
    two_ranks.submit(FreeSequence(sequence_id="c-doomed"))
    while two_ranks.connection.poll(0.2):
        two_ranks.connection.recv()
    stats = two_ranks.stats()
    assert stats.num_free_blocks == stats.num_blocks
    bystander = [opening("c-bystander", draw_prompt(31, 40), max_tokens=20)]
    assert answer_all(two_ranks, bystander) == answer_all(one_rank, bystander)


def test_ranks_that_wait_use_no_processor_time(two_ranks: ProcessLink) -> None:
    processes = [psutil.Process(two_ranks.process.pid), *two_ranks.find_ranks()]
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(2.0)
    used = [sum(p.cpu_times()[:2]) - b for p, b in zip(processes, before, strict=True)]
    assert max(used) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_ranks"), [("llama", 3), ("qwen3", 2), ("gemma2", 2)])
def test_other_families_and_degrees_answer_the_same(
    tmp_path: Path, family: Family, num_ranks: int
) -> None:
    folder = save_model(tmp_path, family, num_kv_heads=num_ranks)
    openings = [opening(f"f{i}", draw_prompt(40 + i, 30), max_tokens=20) for i in range(2)]
    expected = answer_all(build_local_link(folder), openings)
    link = ProcessLink(make_plan(folder, tp_size=num_ranks))
    try:
        assert answer_all(link, openings) == expected
        assert link.stop() == 0
    finally:
        link.kill()
