"""Ends, refusals, failures of one sequence, cancels and full caches."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine
from specrag_inference.messages import (
    EngineEvent,
    FinishReason,
    FreeSequence,
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    SequenceFailed,
    SequenceOpened,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.testing import build_chain_branch, build_random_model, build_tree, drain

if TYPE_CHECKING:
    from specrag_inference.models.loading import LoadedModel

BuildEngine = Callable[..., Engine]
GenerateReference = Callable[[tuple[int, ...], int], list[int]]

MAX_MODEL_LEN = 64


def draw_prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 256, length))


def open_command(name: str, prompt: tuple[int, ...], **sampling: object) -> OpenSequence:
    return OpenSequence(
        sequence_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
    )


def run_alone(name: str, num_tokens: int) -> VerifyTree:
    return VerifyTree(
        sequence_id=name, round=0, tree=TokenTree.empty(), free_run_tokens=num_tokens - 1
    )


def list_tokens(events: list[EngineEvent]) -> list[int]:
    return [
        token.token_id
        for event in events
        if isinstance(event, RoundVerified)
        for token in event.tokens
    ]


def only_failure(events: list[EngineEvent]) -> SequenceFailed:
    (event,) = events
    assert isinstance(event, SequenceFailed)
    return event


@pytest.fixture(scope="module")
def short_model() -> LoadedModel:
    return build_random_model("llama", seed=0, max_model_len=MAX_MODEL_LEN)


@pytest.mark.parametrize("room", range(1, 8))
def test_answer_ends_with_context_when_no_token_fits_any_more(
    build_engine: BuildEngine,
    generate_reference: GenerateReference,
    short_model: LoadedModel,
    room: int,
) -> None:
    prompt = draw_prompt(1, MAX_MODEL_LEN - room)
    truth = generate_reference(prompt, room)
    engine = build_engine(short_model)
    engine.submit(open_command("a", prompt))
    drain(engine)
    tree = build_tree([(0, [build_chain_branch([*truth, 1, 2, 3]), build_chain_branch([9] * 9)])])
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=tree))
    (event,) = drain(engine)
    assert isinstance(event, RoundVerified)
    assert [token.token_id for token in event.tokens] == truth
    assert event.finish_reason is FinishReason.CONTEXT
    assert [token.node_idx for token in event.tokens] == [*range(room - 1), None]


@pytest.mark.parametrize("room", range(1, 5))
def test_drafter_proposes_fewer_tokens_at_the_end_of_its_context(
    build_engine: BuildEngine, short_model: LoadedModel, room: int
) -> None:
    engine = build_engine(short_model)
    engine.submit(open_command("d", draw_prompt(1, MAX_MODEL_LEN - room)))
    engine.submit(FreeSequence(sequence_id="nobody"))
    drain(engine)
    engine.submit(ProposeTokens(sequence_id="d", round=0, committed_token_ids=(), gamma=8))
    (first,) = drain(engine)
    assert isinstance(first, TokensProposed)
    assert [len(branch.token_ids) for branch in first.branches] == [room]
    filled = tuple(range(room))
    engine.submit(ProposeTokens(sequence_id="d", round=1, committed_token_ids=filled, gamma=8))
    (second,) = drain(engine)
    assert isinstance(second, TokensProposed)
    assert second.branches == ()


def test_gamma_zero_only_ingests(build_engine: BuildEngine) -> None:
    engine = build_engine()
    engine.submit(open_command("d", draw_prompt(1, 20)))
    drain(engine)
    for round_, committed in enumerate([(1, 2, 3), (), (4,)]):
        engine.submit(
            ProposeTokens(sequence_id="d", round=round_, committed_token_ids=committed, gamma=0)
        )
        (event,) = drain(engine)
        assert isinstance(event, TokensProposed)
        assert event.branches == ()


def test_stop_string_inside_an_accepted_batch_cuts_tokens_behind_it(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompt = draw_prompt(0, 40)
    truth = generate_reference(prompt, 30)
    texts = [(index, chr(token)) for index, token in enumerate(truth) if 32 < token < 127]
    index, stop = next((i, c) for i, c in texts if i >= 3 and truth.index(ord(c)) == i)
    engine = build_engine()
    engine.submit(open_command("a", prompt, max_tokens=index + 2, stop=(stop,)))
    drain(engine)
    tree = build_tree([(0, [build_chain_branch(truth[: index + 4])])])
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=tree, free_run_tokens=5))
    (event,) = drain(engine)
    assert isinstance(event, RoundVerified)
    assert [token.token_id for token in event.tokens] == truth[: index + 1]
    assert event.finish_reason is FinishReason.STOP_STRING
    assert event.stop_text_length is not None
    assert event.last


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ((), "prompt_token_ids is empty"),
        ((1,) * MAX_MODEL_LEN, "max_model_len=64"),
        ((1, 259), r"outside \[0, 259\)"),
        ((-1, 1), r"outside \[0, 259\)"),
    ],
)
def test_prompt_that_cannot_be_served_is_refused_with_the_limit(
    build_engine: BuildEngine, short_model: LoadedModel, prompt: tuple[int, ...], message: str
) -> None:
    engine = build_engine(short_model)
    engine.submit(open_command("a", prompt))
    failure = only_failure(drain(engine))
    assert failure.code == "INVALID"
    assert re.search(message, failure.message)


def test_prompt_larger_than_the_cache_is_refused_as_capacity(build_engine: BuildEngine) -> None:
    engine = build_engine(num_blocks=4)
    engine.submit(open_command("a", draw_prompt(1, 80)))
    failure = only_failure(drain(engine))
    assert failure.code == "CAPACITY"
    assert "num_tokens=80 needs 6 cache blocks, there are 4" in failure.message


def test_commands_to_sequences_that_are_not_open_fail_as_invalid(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine()
    engine.submit(run_alone("ghost", 1))
    engine.submit(ProposeTokens(sequence_id="ghost", round=0, committed_token_ids=(), gamma=1))
    assert [event.code for event in drain(engine) if isinstance(event, SequenceFailed)] == [
        "INVALID",
        "INVALID",
    ]


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree(
            token_ids=np.array([300], dtype=np.int32),
            parent_idx=np.array([-1], dtype=np.int32),
            proposals=(),
        ),
        TokenTree(
            token_ids=np.array([3, 4], dtype=np.int32),
            parent_idx=np.array([1, -1], dtype=np.int32),
            proposals=(),
        ),
        TokenTree(
            token_ids=np.zeros(64, dtype=np.int32),
            parent_idx=np.arange(-1, 63, dtype=np.int32),
            proposals=(),
        ),
    ],
    ids=["unknown token", "child before parent", "too large for a pass"],
)
def test_broken_tree_fails_its_sequence_and_frees_its_blocks(
    build_engine: BuildEngine, tree: TokenTree
) -> None:
    engine = build_engine()
    engine.submit(open_command("a", draw_prompt(1, 40)))
    drain(engine)
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=tree))
    assert only_failure(drain(engine)).code == "INVALID"
    assert engine.stats().num_free_blocks == engine.config.num_blocks


def test_round_after_the_end_is_invalid(build_engine: BuildEngine) -> None:
    engine = build_engine()
    engine.submit(open_command("a", draw_prompt(1, 9), max_tokens=2))
    engine.submit(FreeSequence(sequence_id="b"))
    drain(engine)
    engine.submit(run_alone("a", 5))
    assert len(list_tokens(drain(engine))) == 2
    engine.submit(run_alone("a", 1))
    assert only_failure(drain(engine)).code == "INVALID"


def test_nan_fails_its_own_sequence_and_leaves_neighbours_and_prefixes_clean(
    build_engine: BuildEngine, tiny_model: LoadedModel, generate_reference: GenerateReference
) -> None:
    poisoned = replace(tiny_model, module=copy.deepcopy(tiny_model.module))
    with torch.no_grad():
        poisoned.module.get_input_embeddings().weight[0] = float("nan")  # type: ignore[operator]
    clean = tuple(token or 1 for token in draw_prompt(2, 40))
    bad = (*clean[:32], *([0] * 20))
    engine = build_engine(poisoned)
    engine.submit(open_command("good", clean, max_tokens=12))
    engine.submit(open_command("bad", bad, max_tokens=12))
    drain(engine)
    engine.submit(run_alone("good", 12))
    engine.submit(run_alone("bad", 12))
    events = drain(engine)
    failures = [event for event in events if isinstance(event, SequenceFailed)]
    assert [(failure.sequence_id, failure.code) for failure in failures] == [("bad", "NUMERICS")]
    assert list_tokens(events) == generate_reference(clean, 12)
    engine.submit(open_command("again", bad))
    (opened,) = drain(engine)
    assert isinstance(opened, SequenceOpened)
    assert opened.num_cached_tokens <= 32


def test_full_cache_preempts_the_youngest_and_everybody_gets_the_right_tokens(
    build_engine: BuildEngine, generate_reference: GenerateReference
) -> None:
    prompts = {f"s{i}": draw_prompt(20 + i, 40) for i in range(4)}
    engine = build_engine(num_blocks=16)
    for name, prompt in prompts.items():
        engine.submit(open_command(name, prompt, max_tokens=70))
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, SequenceOpened):
                engine.submit(run_alone(event.sequence_id, 70))
            elif isinstance(event, RoundVerified):
                tokens[event.sequence_id] += [token.token_id for token in event.tokens]
                if event.finish_reason is not None:
                    engine.submit(FreeSequence(sequence_id=event.sequence_id))
            else:
                raise AssertionError(event)
        engine.check_integrity()
    assert engine.stats().num_preemptions > 0
    for name, prompt in prompts.items():
        assert tokens[name] == generate_reference(prompt, 70)


def test_sequence_that_outgrows_the_whole_cache_fails_as_capacity(
    build_engine: BuildEngine,
) -> None:
    engine = build_engine(num_blocks=4)
    engine.submit(open_command("a", draw_prompt(0, 40), max_tokens=100))
    drain(engine)
    engine.submit(run_alone("a", 100))
    *events, failure = drain(engine)
    assert only_failure([failure]).code == "CAPACITY"
    # 64 tokens fit; the logits of the last give one more.
    assert len(events) == 25


def test_waiting_sequence_does_not_keep_an_idle_engine_busy(build_engine: BuildEngine) -> None:
    engine = build_engine(max_sequences=1)
    engine.submit(open_command("a", draw_prompt(0, 20)))
    engine.submit(open_command("b", draw_prompt(1, 20)))
    (first,) = drain(engine)
    assert isinstance(first, SequenceOpened)
    assert not engine.has_work
    assert engine.stats().num_waiting == 1
    engine.submit(FreeSequence(sequence_id="a"))
    (second,) = drain(engine)
    assert isinstance(second, SequenceOpened)
    assert second.sequence_id == "b"


def test_newer_draft_command_cuts_the_running_one_short(build_engine: BuildEngine) -> None:
    engine = build_engine()
    engine.submit(open_command("d", draw_prompt(4, 30)))
    drain(engine)
    engine.submit(ProposeTokens(sequence_id="d", round=0, committed_token_ids=(), gamma=50))
    for _ in range(3):
        assert engine.step() == []
    engine.submit(ProposeTokens(sequence_id="d", round=1, committed_token_ids=(7, 8), gamma=2))
    events = [event for event in drain(engine) if isinstance(event, TokensProposed)]
    assert [event.round for event in events] == [0, 1]
    assert len(events[0].branches[0].token_ids) < 10
    assert len(events[1].branches[0].token_ids) == 2
