"""The engine commits the tokens that plain decoding commits, whatever is drafted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from specrag_common.speculation.proposals import DraftBranch, VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine
from specrag_inference.messages import (
    FinishReason,
    FreeSequence,
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    SequenceOpened,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.testing import build_chain_branch, build_random_model, build_tree, drain

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]

KEY = bytes(range(16))
END_OF_TURN_ID = 258
COUPLED = VerificationMode.COUPLED
REJECTION = VerificationMode.REJECTION


def draw_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 256, length))


def open_sequence(
    engine: Engine,
    name: str,
    prompt: tuple[int, ...],
    *,
    max_tokens: int = 60,
    temperature: float = 0.0,
    mode: VerificationMode = REJECTION,
) -> SequenceOpened:
    engine.submit(
        OpenSequence(
            sequence_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
            mode=mode,
            random_key=KEY,
        )
    )
    (event,) = drain(engine)
    assert isinstance(event, SequenceOpened)
    return event


def verify(engine: Engine, name: str, round_: int, tree: TokenTree) -> RoundVerified:
    engine.submit(VerifyTree(sequence_id=name, round=round_, tree=tree))
    (event,) = drain(engine)
    assert isinstance(event, RoundVerified)
    return event


def decode_alone(engine: Engine, name: str, num_tokens: int) -> list[int]:
    engine.submit(
        VerifyTree(
            sequence_id=name, round=0, tree=TokenTree.empty(), free_run_tokens=num_tokens - 1
        )
    )
    events = [event for event in drain(engine) if isinstance(event, RoundVerified)]
    assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
    return [token.token_id for event in events for token in event.tokens]


def draw_random_branches(
    rng: np.random.Generator, truth: Sequence[int], num_branches: int
) -> list[DraftBranch]:
    """Branches that follow the true continuation for a while, then go astray."""
    branches = []
    for _ in range(num_branches):
        num_right = int(rng.integers(0, 5))
        astray = rng.integers(0, 256, int(rng.integers(0, 4))).tolist()
        if tokens := [*truth[:num_right], *astray]:
            branches.append(build_chain_branch(tokens))
    return branches


def run_with_random_trees(
    engine: Engine, name: str, truth: list[int], *, seed: int
) -> tuple[list[int], RoundVerified]:
    rng = np.random.default_rng(seed)
    committed: list[int] = []
    for round_ in itertools.count():
        ahead = truth[len(committed) :]
        proposals = [
            (drafter, draw_random_branches(rng, ahead, int(rng.integers(0, 4))))
            for drafter in range(3)
        ]
        event = verify(engine, name, round_, build_tree(proposals))
        engine.check_integrity()
        committed += [token.token_id for token in event.tokens]
        if event.finish_reason is not None:
            return committed, event
    raise AssertionError


@pytest.mark.parametrize("prompt_length", [1, 2, 15, 16, 17, 150])
def test_greedy_decoding_equals_transformers_generate(
    build_engine: BuildEngine, generate_reference: GenerateReference, prompt_length: int
) -> None:
    prompt = draw_prompt(prompt_length, prompt_length)
    engine = build_engine()
    open_sequence(engine, "a", prompt, max_tokens=40)
    assert decode_alone(engine, "a", 40) == generate_reference(prompt, 40)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees_give_the_greedy_tokens_of_plain_decoding(
    build_engine: BuildEngine, generate_reference: GenerateReference, seed: int
) -> None:
    prompt = draw_prompt(seed, 40 + seed)
    truth = generate_reference(prompt, 60)
    engine = build_engine()
    open_sequence(engine, "a", prompt)
    tokens, last = run_with_random_trees(engine, "a", truth, seed=seed)
    assert tokens == truth
    stopped = truth[-1] == END_OF_TURN_ID
    assert last.finish_reason is (FinishReason.STOP_TOKEN if stopped else FinishReason.LENGTH)


@pytest.mark.parametrize("seed", range(3))
def test_coupled_tokens_at_temperature_one_do_not_depend_on_the_trees(
    build_engine: BuildEngine, seed: int
) -> None:
    prompt = draw_prompt(seed, 33)
    engine = build_engine()
    open_sequence(engine, "alone", prompt, temperature=1.0, mode=COUPLED)
    truth = decode_alone(engine, "alone", 60)
    open_sequence(engine, "trees", prompt, temperature=1.0, mode=COUPLED)
    tokens, _ = run_with_random_trees(engine, "trees", truth, seed=seed)
    assert tokens == truth


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
def test_sequences_served_together_get_the_tokens_they_get_alone(
    build_engine: BuildEngine, generate_reference: GenerateReference, backend: str
) -> None:
    prompts = {f"s{i}": draw_prompt(i, 20 + 37 * i) for i in range(5)}
    engine = build_engine(backend=backend)
    for name, prompt in prompts.items():
        engine.submit(
            OpenSequence(
                sequence_id=name,
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=24),
            )
        )
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, SequenceOpened):
                engine.submit(
                    VerifyTree(
                        sequence_id=event.sequence_id,
                        round=0,
                        tree=TokenTree.empty(),
                        free_run_tokens=23,
                    )
                )
            elif isinstance(event, RoundVerified):
                tokens[event.sequence_id] += [token.token_id for token in event.tokens]
    for name, prompt in prompts.items():
        assert tokens[name] == generate_reference(prompt, 24)


def run_speculation(
    target: Engine,
    drafter: Engine,
    prompt: tuple[int, ...],
    *,
    num_branches: int = 1,
    **law: object,
) -> tuple[list[int], int, int]:
    """Draft and verify until the answer ends; return tokens, accepted, drafted per branch."""
    open_sequence(target, "target", prompt, **law)  # type: ignore[arg-type]
    open_sequence(drafter, "draft", prompt, **law)  # type: ignore[arg-type]
    committed: tuple[int, ...] = ()
    tokens: list[int] = []
    num_accepted = num_drafted = 0
    for round_ in itertools.count():
        drafter.submit(
            ProposeTokens(
                sequence_id="draft",
                round=round_,
                committed_token_ids=committed,
                gamma=5,
                num_branches=num_branches,
            )
        )
        (proposed,) = drain(drafter)
        assert isinstance(proposed, TokensProposed)
        event = verify(target, "target", round_, build_tree([(0, proposed.branches)]))
        drafter.check_integrity()
        committed = tuple(token.token_id for token in event.tokens)
        tokens += committed
        num_accepted += sum(token.node_idx is not None for token in event.tokens)
        num_drafted += len(proposed.branches[0].token_ids)
        if event.finish_reason is not None:
            return tokens, num_accepted, num_drafted
    raise AssertionError


def test_drafter_equal_to_the_target_is_always_accepted_at_temperature_zero(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompt = draw_prompt(5, 70)
    tokens, num_accepted, num_drafted = run_speculation(
        build_engine(), build_engine(), prompt, max_tokens=300
    )
    assert num_accepted == num_drafted == 250
    assert tokens == generate_reference(prompt, 300)


@pytest.mark.parametrize("num_branches", [1, 3])
def test_drafter_equal_to_the_target_is_always_accepted_when_coupled(
    build_engine: BuildEngine, num_branches: int
) -> None:
    prompt = draw_prompt(6, 50)
    tokens, num_accepted, num_drafted = run_speculation(
        build_engine(),
        build_engine(),
        prompt,
        num_branches=num_branches,
        max_tokens=120,
        temperature=1.0,
        mode=COUPLED,
    )
    assert num_accepted == num_drafted == 100
    assert len(tokens) == 120


def test_another_draft_model_leaves_the_greedy_tokens_unchanged(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompt = draw_prompt(7, 50)
    drafter = build_engine(build_random_model("qwen3", seed=9))
    tokens, num_accepted, num_drafted = run_speculation(
        build_engine(), drafter, prompt, num_branches=3, max_tokens=60
    )
    assert tokens == generate_reference(prompt, 60)
    assert num_accepted < num_drafted


def test_sampled_drafts_carry_the_law_they_were_drawn_from(build_engine: BuildEngine) -> None:
    engine = build_engine()
    open_sequence(engine, "draft", draw_prompt(8, 30), temperature=1.0)
    engine.submit(
        ProposeTokens(sequence_id="draft", round=0, committed_token_ids=(), gamma=4, num_branches=3)
    )
    (event,) = drain(engine)
    assert isinstance(event, TokensProposed)
    assert len(event.branches) == 3
    for branch in event.branches:
        assert len(branch.token_ids) == 4
        for token_id, law in zip(branch.token_ids, branch.laws, strict=True):
            assert law is not None
            assert token_id in law.token_ids


def test_resumed_answer_goes_on_with_the_tokens_of_the_first_run(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompt = draw_prompt(9, 45)
    truth = generate_reference(prompt, 30)
    engine = build_engine()
    engine.submit(
        OpenSequence(
            sequence_id="a",
            prompt_token_ids=prompt,
            answer_token_ids=tuple(truth[:11]),
            sampling=SamplingParams(max_tokens=30),
        )
    )
    assert isinstance(drain(engine)[0], SequenceOpened)
    assert decode_alone(engine, "a", 50) == truth[11:]


def test_second_prompt_prefills_only_what_differs_and_answers_as_a_cold_one(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    shared = draw_prompt(10, 100)
    first, second = (*shared, *draw_prompt(11, 20)), (*shared, *draw_prompt(12, 20))
    engine = build_engine()
    assert open_sequence(engine, "a", first).num_cached_tokens == 0
    engine.submit(FreeSequence(sequence_id="a"))
    assert open_sequence(engine, "b", second).num_cached_tokens == 96
    assert decode_alone(engine, "b", 20) == generate_reference(second, 20)


def test_answer_of_an_earlier_turn_is_found_as_prefix_of_the_next(
    build_engine: BuildEngine,
) -> None:
    prompt = draw_prompt(13, 40)
    engine = build_engine()
    open_sequence(engine, "turn1", prompt, max_tokens=40)
    answer = decode_alone(engine, "turn1", 40)
    engine.submit(FreeSequence(sequence_id="turn1"))
    opened = open_sequence(engine, "turn2", (*prompt, *answer, *draw_prompt(14, 10)))
    assert opened.num_cached_tokens == 64


def test_prefixes_are_not_shared_across_cache_scopes(build_engine: BuildEngine) -> None:
    prompt = draw_prompt(15, 60)
    engine = build_engine()
    cached = []
    for name, scope in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        engine.submit(OpenSequence(sequence_id=name, prompt_token_ids=prompt, cache_scope=scope))
        (event,) = drain(engine)
        assert isinstance(event, SequenceOpened)
        cached.append(event.num_cached_tokens)
    assert cached == [0, 0, 48]
