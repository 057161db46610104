"""Sampling parameters through the engine: trees, plain decoding and a reference agree."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine
from specrag_inference.messages import (
    FinishReason,
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    SequenceFailed,
    TokensProposed,
    VerifiedToken,
    VerifyTree,
)
from specrag_inference.sampling.history import TokenHistory
from specrag_inference.sampling.processors import compute_law, softmax
from specrag_inference.testing import BYTE_VOCAB_SIZE, build_chain_branch, build_tree, drain

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from specrag_common.speculation.proposals import DraftBranch
    from specrag_inference.models.loading import LoadedModel

BuildEngine = Callable[..., Engine]
ComputeLogits = Callable[[Sequence[int]], "NDArray[np.float32]"]

PROMPT = tuple(b"to be or not to be, that is the question")
MAX_TOKENS = 40
SAMPLINGS = {
    "min-p": SamplingParams(temperature=1.2, min_p=0.1),
    "repetition": SamplingParams(temperature=0.8, repetition_penalty=1.6),
    "presence": SamplingParams(temperature=0.8, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.8, frequency_penalty=0.9),
    "logit bias": SamplingParams(temperature=1.0, logit_bias=((101, 3.0), (32, -100.0))),
    "minimum length": SamplingParams(temperature=1.5, min_tokens=30),
    "everything": SamplingParams(
        temperature=1.1,
        top_p=0.95,
        top_k=60,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias=((97, 1.0),),
        min_tokens=10,
    ),
    "greedy with penalties": SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "greedy with bias": SamplingParams(logit_bias=((101, 9.0), (74, -9.0)), min_tokens=20),
}


@pytest.fixture(scope="session")
def compute_logits(tiny_model: LoadedModel) -> ComputeLogits:
    """Logits behind a sequence, by transformers' own forward over all of it."""
    module = copy.deepcopy(tiny_model.module)
    module.set_attn_implementation("eager")

    def compute(token_ids: Sequence[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            logits = module(input_ids=torch.tensor([list(token_ids)])).logits
        row: NDArray[np.float32] = logits[0, -1, :BYTE_VOCAB_SIZE].numpy()
        return row

    return compute


def open_target(engine: Engine, name: str, sampling: SamplingParams) -> None:
    engine.submit(
        OpenSequence(
            sequence_id=name,
            prompt_token_ids=PROMPT,
            sampling=replace(sampling, max_tokens=MAX_TOKENS),
            mode=VerificationMode.COUPLED,
            random_key=bytes(range(16)),
        )
    )
    drain(engine)


def verify(engine: Engine, name: str, tree: TokenTree, free_run: int = 0) -> list[RoundVerified]:
    engine.submit(VerifyTree(sequence_id=name, round=0, tree=tree, free_run_tokens=free_run))
    return [event for event in drain(engine) if isinstance(event, RoundVerified)]


def decode_alone(
    engine: Engine, sampling: SamplingParams, *, name: str = "alone"
) -> list[VerifiedToken]:
    open_target(engine, name, sampling)
    events = verify(engine, name, TokenTree.empty(), free_run=MAX_TOKENS)
    return [token for event in events for token in event.tokens]


def draw_branches(rng: np.random.Generator, ahead: Sequence[int]) -> list[DraftBranch]:
    """Up to three branches that follow the true continuation for a while."""
    branches = []
    for _ in range(int(rng.integers(0, 4))):
        astray = rng.integers(0, 256, int(rng.integers(0, 3))).tolist()
        if tokens := [*ahead[: int(rng.integers(0, 6))], *astray]:
            branches.append(build_chain_branch(tokens))
    return branches


def decode_with_trees(
    engine: Engine, sampling: SamplingParams, truth: Sequence[int], *, seed: int
) -> tuple[list[VerifiedToken], RoundVerified]:
    open_target(engine, "trees", sampling)
    rng = np.random.default_rng(seed)
    tokens: list[VerifiedToken] = []
    while True:
        ahead = truth[len(tokens) :]
        tree = build_tree([(drafter, draw_branches(rng, ahead)) for drafter in range(3)])
        (event,) = verify(engine, "trees", tree)
        tokens += event.tokens
        if event.finish_reason is not None:
            return tokens, event


def ids_of(tokens: Sequence[VerifiedToken]) -> list[int]:
    return [token.token_id for token in tokens]


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_trees_give_the_tokens_of_plain_decoding(build_engine: BuildEngine, name: str) -> None:
    engine = build_engine()
    truth = ids_of(decode_alone(engine, SAMPLINGS[name]))
    tokens, _ = decode_with_trees(engine, SAMPLINGS[name], truth, seed=len(name))
    assert ids_of(tokens) == truth
    assert any(token.node_idx is not None for token in tokens)


@pytest.mark.parametrize("name", ["greedy with penalties", "greedy with bias"])
def test_greedy_tokens_equal_a_reference_that_counts_everything_anew(
    build_engine: BuildEngine, compute_logits: ComputeLogits, name: str
) -> None:
    sampling = replace(SAMPLINGS[name], stop_token_ids=frozenset({258}))
    engine = build_engine()
    tokens = ids_of(decode_alone(engine, SAMPLINGS[name]))
    expected: list[int] = []
    for _ in tokens:
        history = TokenHistory.of(prompt_token_ids=PROMPT, answer_token_ids=expected)
        law = compute_law(compute_logits([*PROMPT, *expected]), sampling, history)
        expected.append(int(np.argmax(law)))
    assert tokens == expected
    assert tokens != ids_of(decode_alone(engine, SamplingParams(), name="plain"))


@pytest.mark.parametrize("name", ["everything", "greedy with penalties", "min-p"])
def test_logprobs_equal_a_scoring_pass_for_accepted_residual_and_bonus_tokens(
    build_engine: BuildEngine, compute_logits: ComputeLogits, name: str
) -> None:
    sampling = replace(SAMPLINGS[name], num_top_logprobs=5)
    engine = build_engine()
    truth = ids_of(decode_alone(engine, sampling))
    tokens, _ = decode_with_trees(engine, sampling, truth, seed=3)
    kinds = {(token.node_idx is not None, token.is_bonus) for token in tokens}
    assert kinds == {(True, False), (False, False), (False, True)}
    # Temperature 0 has a one-hot law: the log-probs are those of temperature 1 behind penalties.
    is_greedy = sampling.temperature == 0.0
    scoring = replace(
        sampling,
        temperature=sampling.temperature or 1.0,
        stop_token_ids=frozenset({258}),
    )
    for idx, token in enumerate(tokens):
        history = TokenHistory.of(prompt_token_ids=PROMPT, answer_token_ids=truth[:idx])
        law = compute_law(compute_logits([*PROMPT, *truth[:idx]]), scoring, history)
        assert token.logprob == pytest.approx(np.log(law[token.token_id]), abs=1e-4)
        best = np.argsort(-law, kind="stable")[:5]
        assert [one.token_id for one in token.top_logprobs] == best[law[best] > 0].tolist()
        for one in token.top_logprobs:
            assert one.logprob == pytest.approx(np.log(law[one.token_id]), abs=1e-4)
        assert not is_greedy or token.top_logprobs[0].token_id == token.token_id
    assert any(token.logprob < -0.1 for token in tokens)


@pytest.mark.parametrize(("count", "num_listed"), [(None, 0), (0, 0), (3, 3)])
def test_log_probs_are_told_as_far_as_asked_for(
    build_engine: BuildEngine, count: int | None, num_listed: int
) -> None:
    tokens = decode_alone(build_engine(), SamplingParams(num_top_logprobs=count))
    assert {len(token.top_logprobs) for token in tokens} == {num_listed}
    assert all((token.logprob == 0.0) is (count is None) for token in tokens)


def test_log_probs_are_cut_where_a_stop_string_ends_the_answer(build_engine: BuildEngine) -> None:
    engine = build_engine()
    truth = ids_of(decode_alone(engine, SamplingParams(stop_token_ids=frozenset())))
    text = next(chr(token_id) for token_id in truth[2:] if 32 < token_id < 127)
    sampling = SamplingParams(stop=(text,), num_top_logprobs=2)
    open_target(engine, "stopped", sampling)
    chain = build_tree([(0, [build_chain_branch(truth[:30])])])
    (event,) = verify(engine, "stopped", chain)
    assert event.finish_reason is FinishReason.STOP_STRING
    assert len(event.tokens) == truth.index(ord(text)) + 1
    assert all(len(token.top_logprobs) == 2 for token in event.tokens)


def test_log_probs_are_told_for_an_accepted_stop_token(build_engine: BuildEngine) -> None:
    engine = build_engine()
    truth = ids_of(decode_alone(engine, SamplingParams()))
    sampling = SamplingParams(num_top_logprobs=1, stop_token_ids=frozenset({truth[3]}))
    open_target(engine, "stopped", sampling)
    (event,) = verify(engine, "stopped", build_tree([(0, [build_chain_branch(truth[:8])])]))
    end = truth.index(truth[3])
    assert event.finish_reason is FinishReason.STOP_TOKEN
    assert ids_of(event.tokens) == truth[: end + 1]
    assert [token.top_logprobs[0].token_id for token in event.tokens] == truth[: end + 1]


def test_no_end_token_comes_before_the_minimum_length(build_engine: BuildEngine) -> None:
    engine = build_engine()
    first = ids_of(decode_alone(engine, SamplingParams()))[0]
    stops = frozenset({first})
    ended = SamplingParams(stop_token_ids=stops)
    open_target(engine, "ended", ended)
    (event,) = verify(engine, "ended", TokenTree.empty())
    assert event.finish_reason is FinishReason.STOP_TOKEN
    open_target(engine, "longer", replace(ended, min_tokens=6))
    proposed = build_tree([(0, [build_chain_branch([first, first])])])
    tokens: list[int] = []
    while len(tokens) < 6:
        (event,) = verify(engine, "longer", proposed)
        tokens += ids_of(event.tokens)
    assert first not in tokens[:6]
    assert event.finish_reason is None or len(tokens) > 6


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_drafter_equal_to_the_target_is_always_accepted(
    build_engine: BuildEngine, name: str
) -> None:
    """The draft side sees the growing branch as the target sees its path."""
    target, drafter = build_engine(), build_engine()
    open_target(target, "target", SAMPLINGS[name])
    open_target(drafter, "draft", SAMPLINGS[name])
    committed: tuple[int, ...] = ()
    num_rejected = 0
    for round_ in itertools.count():
        drafter.submit(
            ProposeTokens(sequence_id="draft", round=round_, committed_token_ids=committed, gamma=5)
        )
        (proposed,) = drain(drafter)
        assert isinstance(proposed, TokensProposed)
        (event,) = verify(target, "target", build_tree([(0, proposed.branches)]))
        num_accepted = sum(token.node_idx is not None for token in event.tokens)
        if event.finish_reason is not None:
            break
        num_rejected += len(proposed.branches[0].token_ids) - num_accepted
        committed = tuple(ids_of(event.tokens))
    assert num_rejected == 0


def test_a_round_that_rejects_everything_changes_no_law(build_engine: BuildEngine) -> None:
    sampling = SAMPLINGS["greedy with penalties"]
    engine = build_engine()
    truth = ids_of(decode_alone(engine, sampling))
    open_target(engine, "rejecting", sampling)
    tokens: list[int] = []
    for token_id in truth[:20]:
        wrong = [(token_id + 1 + idx) % 256 for idx in range(4)]
        tree = build_tree([(0, [build_chain_branch([one, one, one]) for one in wrong])])
        (event,) = verify(engine, "rejecting", tree)
        tokens += ids_of(event.tokens)
    assert tokens == truth[:20]


def test_bias_for_a_token_that_the_model_lacks_is_refused(build_engine: BuildEngine) -> None:
    engine = build_engine()
    sampling = SamplingParams(logit_bias=((BYTE_VOCAB_SIZE, 1.0),))
    engine.submit(OpenSequence(sequence_id="a", prompt_token_ids=PROMPT, sampling=sampling))
    (event,) = drain(engine)
    assert isinstance(event, SequenceFailed)
    assert event.code == "INVALID"
    assert "259 of logit_bias" in event.message


def test_softmax_is_the_law_of_temperature_one() -> None:
    logits = np.array([0.5, -1.0, 2.0])
    assert softmax(logits).tolist() == compute_law(logits, SamplingParams(temperature=1.0)).tolist()
