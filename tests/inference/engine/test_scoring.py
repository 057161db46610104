"""Scoring a tree gives what scoring every branch alone gives, and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_common.speculation.token_tree import ROOT, TokenTree
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import (
    EngineEvent,
    FreeSequence,
    OpenSequence,
    RoundVerified,
    SamplingParams,
    ScoreTree,
    SequenceFailed,
    SequenceOpened,
    TreeScored,
    VerifyTree,
)
from specrag_inference.runner import ModelRunner, TokenVocabulary
from specrag_inference.testing import (
    BYTE_VOCAB_SIZE,
    build_byte_tokenizer,
    build_random_model,
    drain,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from specrag_inference.attention.step import StepInputs
    from specrag_inference.cache.storage import SlotIds
    from specrag_inference.models.loading import LoadedModel
    from specrag_inference.runner import LogitRows
    from specrag_inference.step_runner import StepRunner

BuildEngine = Callable[..., Engine]
ScoreAlone = Callable[[tuple[int, ...], list[int]], "NDArray[np.float32]"]

PROMPT = tuple(int(token) for token in np.random.default_rng(0).integers(0, 256, 37))


@pytest.fixture(scope="module")
def score_alone(tiny_model: LoadedModel) -> ScoreAlone:
    """Log-probs of a continuation by transformers' own forward over prompt and continuation."""
    module = copy.deepcopy(tiny_model.module)
    module.set_attn_implementation("eager")

    def score(prompt: tuple[int, ...], branch: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = module(torch.tensor([[*prompt, *branch]])).logits[0, :, :BYTE_VOCAB_SIZE]
        rows = logits[len(prompt) - 1 : -1].log_softmax(dim=-1)
        found: NDArray[np.float32] = rows[range(len(branch)), branch].numpy()
        return found

    return score


def draw_tree(rng: np.random.Generator, num_nodes: int, *, reach: int) -> TokenTree:
    """Draw a tree whose nodes hang on one of the ``reach`` nodes before them, or on the root."""
    nodes = np.arange(num_nodes)
    parents = np.maximum(nodes - rng.integers(1, reach + 1, num_nodes), ROOT)
    return TokenTree(
        token_ids=rng.integers(0, 256, num_nodes).astype(np.int32),
        parent_idx=parents.astype(np.int32),
        proposals=(),
    )


def build_drafts(rng: np.random.Generator, num_drafts: int, length: int) -> TokenTree:
    """Long chains behind a shared beginning of ten nodes, laid out in turns."""
    parents = [*range(-1, 9), *([9] * num_drafts)]
    parents += [10 + node for node in range(num_drafts * (length - 1))]
    return TokenTree(
        token_ids=rng.integers(0, 256, len(parents)).astype(np.int32),
        parent_idx=np.array(parents, dtype=np.int32),
        proposals=(),
    )


def score_command(tree: TokenTree, **facts: object) -> ScoreTree:
    return ScoreTree(
        sequence_id="a",
        score_id=7,
        token_ids=tree.token_ids,
        parent_idx=tree.parent_idx,
        **facts,  # type: ignore[arg-type]
    )


def open_sequence(engine: Engine, prompt: tuple[int, ...] = PROMPT, **sampling: object) -> None:
    engine.submit(
        OpenSequence(
            sequence_id="a",
            prompt_token_ids=prompt,
            sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        )
    )
    (event,) = drain(engine)
    assert isinstance(event, SequenceOpened)


def score(engine: Engine, command: ScoreTree) -> TreeScored:
    held = engine.stats().num_used_blocks
    engine.submit(command)
    while engine.has_work:
        events = engine.step()
        engine.check_integrity()
    (event,) = events
    assert isinstance(event, TreeScored)
    assert event.score_id == 7
    assert engine.stats().num_used_blocks == held
    return event


def check_against_branches(
    scored: NDArray[np.float32], tree: TokenTree, score_alone: ScoreAlone
) -> None:
    children = tree.compute_children()
    for leaf in range(tree.num_nodes):
        if leaf not in children:
            path = [*tree.compute_path(leaf)]
            alone = score_alone(PROMPT, tree.token_ids[path].tolist())
            np.testing.assert_allclose(scored[path], alone, atol=1e-3)


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
@pytest.mark.parametrize(("num_nodes", "reach"), [(1, 1), (40, 1), (40, 40), (150, 5), (150, 40)])
def test_every_branch_gets_the_log_probs_it_gets_alone(
    build_engine: BuildEngine, score_alone: ScoreAlone, num_nodes: int, reach: int, backend: str
) -> None:
    tree = draw_tree(np.random.default_rng(num_nodes + reach), num_nodes, reach=reach)
    engine = build_engine(backend=backend)
    open_sequence(engine)
    check_against_branches(score(engine, score_command(tree)).logprobs, tree, score_alone)


def test_drafts_larger_than_pass_and_cache_need_room_for_one_branch_only(
    build_engine: BuildEngine, score_alone: ScoreAlone
) -> None:
    tree = build_drafts(np.random.default_rng(1), 8, 150)
    engine = build_engine(num_blocks=20, max_step_tokens=64)
    assert tree.num_nodes > 3 * 20 * 16
    open_sequence(engine)
    event = score(engine, score_command(tree))
    check_against_branches(event.logprobs, tree, score_alone)
    assert event.num_passes >= tree.num_nodes / 64


class WatchingRunner:
    """Runs passes and notes how large their masks are."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.largest_mask = 0

    def execute(self, step: StepInputs) -> LogitRows:
        sizes = [segment.num_queries * segment.num_keys for segment in step.segments]
        self.largest_mask = max(self.largest_mask, *sizes)
        return self._runner.execute(step)

    def copy_slots(self, source: SlotIds, destination: SlotIds) -> None:
        self._runner.copy_slots(source, destination)


def test_masks_of_six_thousand_nodes_stay_as_small_as_a_prefill_chunks(
    tiny_model: LoadedModel, score_alone: ScoreAlone
) -> None:
    tokenizer = build_byte_tokenizer()
    vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), tiny_model.vocab_size)
    runner = WatchingRunner(ModelRunner(tiny_model, vocabulary, num_blocks=80, block_size=16))
    config = EngineConfig(num_blocks=80, max_step_tokens=256)
    engine = Engine(tiny_model, tokenizer, config, runner=runner)
    tree = build_drafts(np.random.default_rng(10), 10, 600)
    assert tree.num_nodes == 6010
    open_sequence(engine)
    scored = score(engine, score_command(tree)).logprobs
    # A pass sees the prompt, the path of the branch at work, and itself.
    assert runner.largest_mask <= 256 * (len(PROMPT) + 610 + 256)
    path = [*tree.compute_path(6009)]
    alone = score_alone(PROMPT, tree.token_ids[path].tolist())
    np.testing.assert_allclose(scored[path], alone, atol=1e-3)


def test_order_of_nodes_does_not_matter(build_engine: BuildEngine) -> None:
    rng = np.random.default_rng(2)
    tree = draw_tree(rng, 120, reach=30)
    depths = tree.compute_levels()
    order = sorted(range(120), key=lambda node: (depths[node], rng.random()))
    engine = build_engine()
    open_sequence(engine)
    straight = score(engine, score_command(tree)).logprobs
    permuted = score(engine, score_command(tree.permuted(order))).logprobs
    np.testing.assert_allclose(permuted, straight[order], atol=1e-3)


def test_only_wanted_nodes_are_scored_and_only_what_leads_to_them_is_computed(
    build_engine: BuildEngine,
) -> None:
    tree = build_drafts(np.random.default_rng(3), 4, 30)
    wanted = np.zeros(tree.num_nodes, dtype=np.bool_)
    wanted[[0, 12, 40]] = True
    engine = build_engine()
    open_sequence(engine)
    everything = score(engine, score_command(tree)).logprobs
    before = engine.stats().batches
    some = score(engine, score_command(tree, is_wanted=wanted)).logprobs
    done = engine.stats().batches - before
    np.testing.assert_allclose(some[wanted], everything[wanted], atol=1e-3)
    assert np.isnan(some[~wanted]).all()
    # The pending token, the shared ten nodes and the branch above node 40.
    assert sum(done.num_tokens.values()) == 1 + 10 + 7


def test_scores_of_committed_tokens_equal_those_of_the_same_tokens_as_nodes(
    build_engine: BuildEngine, score_alone: ScoreAlone
) -> None:
    engine = build_engine()
    open_sequence(engine)
    chain = draw_tree(np.random.default_rng(4), 20, reach=1)
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=TokenTree.empty(), free_run_tokens=9))
    events = [event for event in drain(engine) if isinstance(event, RoundVerified)]
    answer = tuple(token.token_id for event in events for token in event.tokens)
    found = score(engine, score_command(chain)).logprobs
    alone = score_alone((*PROMPT, *answer), chain.token_ids.tolist())
    np.testing.assert_allclose(found, alone, atol=1e-3)


def test_sequence_goes_on_after_scoring_as_if_nothing_had_been(
    build_engine: BuildEngine, generate_reference: Callable[..., list[int]]
) -> None:
    engine = build_engine()
    open_sequence(engine, max_tokens=30)
    tokens: list[int] = []
    for round_ in range(3):
        score(engine, score_command(draw_tree(np.random.default_rng(round_), 80, reach=9)))
        engine.submit(
            VerifyTree(sequence_id="a", round=round_, tree=TokenTree.empty(), free_run_tokens=9)
        )
        tokens += [
            token.token_id
            for event in drain(engine)
            if isinstance(event, RoundVerified)
            for token in event.tokens
        ]
    assert tokens == generate_reference(PROMPT, 30)


def test_scoring_survives_losing_its_blocks_midway(
    build_engine: BuildEngine, score_alone: ScoreAlone
) -> None:
    tree = build_drafts(np.random.default_rng(5), 5, 60)
    engine = build_engine(num_blocks=10, max_step_tokens=32, max_shared_prefill_tokens=16)
    rival = tuple(int(token) for token in np.random.default_rng(6).integers(0, 256, 60))
    engine.submit(OpenSequence(sequence_id="older", prompt_token_ids=rival))
    drain(engine)
    open_sequence(engine)
    engine.submit(score_command(tree))
    engine.submit(
        VerifyTree(sequence_id="older", round=0, tree=TokenTree.empty(), free_run_tokens=120)
    )
    scored = [event for event in drain(engine) if isinstance(event, TreeScored)]
    assert engine.stats().num_preemptions > 0
    check_against_branches(scored[0].logprobs, tree, score_alone)


def test_tree_without_nodes_is_answered_at_once(build_engine: BuildEngine) -> None:
    engine = build_engine()
    open_sequence(engine)
    event = score(engine, score_command(TokenTree.empty()))
    assert event.logprobs.shape == (0,)
    assert event.num_passes == 0


def expect_failure(events: list[EngineEvent], message: str) -> None:
    (event,) = events
    assert isinstance(event, SequenceFailed)
    assert event.code == "INVALID"
    assert message in event.message


@pytest.mark.parametrize(
    ("parents", "tokens", "message"),
    [
        ([-1, 2, 1], [1, 2, 3], "parent_idx[1]=2"),
        ([-1, 0], [1, 259], "outside [0, 259)"),
        ([-1], [1, 2], "parent_idx has 1 values for num_nodes=2"),
        ([*range(-1, 28)], [1] * 29, "num_tokens=65, which exceeds max_model_len=64"),
    ],
)
def test_broken_tree_fails_its_sequence_with_the_reason(
    build_engine: BuildEngine, parents: list[int], tokens: list[int], message: str
) -> None:
    engine = build_engine(build_random_model("llama", seed=0, max_model_len=64))
    open_sequence(engine, PROMPT[:36])
    engine.submit(
        ScoreTree(
            sequence_id="a",
            score_id=0,
            token_ids=np.array(tokens, dtype=np.int32),
            parent_idx=np.array(parents, dtype=np.int32),
        )
    )
    expect_failure(drain(engine), message)
    assert engine.stats().num_used_blocks == 0


def test_branch_that_just_fits_the_context_is_scored(
    build_engine: BuildEngine, score_alone: ScoreAlone
) -> None:
    engine = build_engine(build_random_model("llama", seed=0, max_model_len=64))
    open_sequence(engine)
    chain = draw_tree(np.random.default_rng(8), 64 - len(PROMPT), reach=1)
    found = score(engine, score_command(chain)).logprobs
    np.testing.assert_allclose(found, score_alone(PROMPT, chain.token_ids.tolist()), atol=1e-3)


def test_freeing_in_the_middle_of_scoring_returns_all_blocks(build_engine: BuildEngine) -> None:
    tree = build_drafts(np.random.default_rng(9), 4, 60)
    for num_steps in range(1, 6):
        engine = build_engine()
        open_sequence(engine)
        engine.submit(score_command(tree))
        for _ in range(num_steps):
            engine.step()
        engine.submit(FreeSequence(sequence_id="a"))
        assert drain(engine) == []
        assert engine.stats().num_used_blocks == 0
