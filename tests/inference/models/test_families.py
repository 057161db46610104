"""Every model family through block cache and tree attention against transformers' own forward.

The reference holds the same weights under transformers' ``eager`` attention and runs every
root-to-node path as one plain sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import OpenSequence, RoundVerified, SamplingParams, VerifyTree
from specrag_inference.testing import build_byte_tokenizer, build_chain_branch, build_tree, drain

from tests.inference.models.families import CONFIGS, NARROW_WINDOW, WINDOW, ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens, list_path

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

pytestmark = pytest.mark.congruence

TOLERANCE = 1e-4
BLOCK_SIZE = 8
EDGE_LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE, 37]
BACKENDS = ["dense", "sdpa"]

BUSHY = (-1, -1, 0, 0, 2, 1, 4, 4)
DEEP = (-1, 0, 1, 2, 3, 4, 5, 2, 7, 8)
"""Deeper than the narrow window: from the fourth level on a node does not see the first."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def reference(request: pytest.FixtureRequest) -> ReferenceModel:
    return ReferenceModel(request.param)


@pytest.fixture(params=BACKENDS)
def rig(reference: ReferenceModel, request: pytest.FixtureRequest) -> Rig:
    return Rig(reference.loaded, request.param, block_size=BLOCK_SIZE)


def assert_equal(
    reference: ReferenceModel, token_ids: list[int], actual: NDArray[np.float32]
) -> None:
    """The last rows of the plain forward over ``token_ids`` are ``actual``."""
    expected = reference.compute_logits(token_ids).numpy()[-len(actual) :]
    assert np.abs(actual - expected).max() < TOLERANCE


def assert_paths_equal(
    reference: ReferenceModel,
    prompt: list[int],
    parents: Sequence[int],
    nodes: list[int],
    rows: NDArray[np.float32],
) -> None:
    """``rows`` are the last ``len(rows)`` nodes, each as after a plain run over its path."""
    for node in range(len(nodes) - len(rows), len(nodes)):
        row = rows[node - len(nodes)][None]
        assert_equal(reference, prompt + list_path(parents, nodes, node), row)


@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_whole_prefill_equals_the_plain_forward_at_every_token(
    reference: ReferenceModel, rig: Rig, length: int
) -> None:
    tokens = draw_tokens(length, length)
    (rows,) = rig.run([Share(table=rig.build_table(), chain=tokens)])
    assert_equal(reference, tokens, rows)


@pytest.mark.parametrize("length", EDGE_LENGTHS[1:])
@pytest.mark.parametrize("chunk", [5, BLOCK_SIZE])
def test_chunked_prefill_equals_the_plain_forward_at_every_token(
    reference: ReferenceModel, rig: Rig, length: int, chunk: int
) -> None:
    tokens = draw_tokens(length, length)
    table = rig.build_table()
    rows = [
        rig.run([Share(table=table, chain=tokens[start : start + chunk])])[0]
        for start in range(0, length, chunk)
    ]
    assert_equal(reference, tokens, np.concatenate(rows))


@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, 37])
def test_decode_steps_equal_the_plain_forward(
    reference: ReferenceModel, rig: Rig, length: int
) -> None:
    tokens = draw_tokens(length, length + 4)
    table = rig.prefill(tokens[:length])
    rows = [rig.run([Share(table=table, chain=[token])])[0] for token in tokens[length:]]
    assert_equal(reference, tokens, np.concatenate(rows))


@pytest.mark.parametrize("length", EDGE_LENGTHS)
@pytest.mark.parametrize("parents", [BUSHY, DEEP], ids=["bushy", "deep"])
def test_every_tree_node_equals_the_plain_forward_over_its_path(
    reference: ReferenceModel, rig: Rig, length: int, parents: tuple[int, ...]
) -> None:
    prompt, nodes = draw_tokens(length, length), draw_tokens(100, len(parents))
    table = rig.prefill(prompt[:-1])
    share = Share(table=table, chain=prompt[-1:], parents=parents, nodes=nodes)
    (rows,) = rig.run([share])
    assert_equal(reference, prompt, rows[:1])
    assert_paths_equal(reference, prompt, parents, nodes, rows[1:])


@pytest.mark.parametrize("length", [BLOCK_SIZE + 1, 37])
def test_nodes_grown_behind_cached_nodes_equal_the_plain_forward(
    reference: ReferenceModel, rig: Rig, length: int
) -> None:
    prompt, nodes = draw_tokens(length, length), draw_tokens(101, len(DEEP))
    table = rig.prefill(prompt)
    rig.run([Share(table=table, parents=DEEP[:4], nodes=nodes[:4])])
    (rows,) = rig.run([Share(table=table, parents=DEEP, nodes=nodes, num_resident=4)])
    assert len(rows) == len(DEEP) - 4
    assert_paths_equal(reference, prompt, DEEP, nodes, rows)


def test_accepted_path_serves_as_context_after_compaction(
    reference: ReferenceModel, rig: Rig
) -> None:
    prompt, nodes = draw_tokens(1, 13), draw_tokens(2, len(DEEP))
    table = rig.build_table()
    rig.run([Share(table=table, chain=prompt, parents=DEEP, nodes=nodes)])
    table.accept([0, 1, 2, 7, 8])
    (rows,) = rig.run([Share(table=table, chain=[5, 6])])
    assert_equal(reference, [*prompt, *list_path(DEEP, nodes, 8), 5, 6], rows)


def test_prefill_decode_and_trees_of_several_sequences_share_a_pass(
    reference: ReferenceModel, rig: Rig
) -> None:
    prompts = [draw_tokens(seed, length) for seed, length in ((1, 5), (2, 26), (3, 16), (4, 40))]
    nodes = draw_tokens(9, len(DEEP))
    shares = [
        Share(table=rig.build_table(), chain=prompts[0]),
        Share(table=rig.prefill(prompts[1][:-1]), chain=prompts[1][-1:]),
        Share(table=rig.prefill(prompts[2], chunk=7), parents=DEEP, nodes=nodes),
        Share(
            table=rig.prefill(prompts[3][:20]),
            chain=prompts[3][20:],
            parents=BUSHY,
            nodes=nodes[: len(BUSHY)],
        ),
    ]
    rows = rig.run(shares)
    assert_equal(reference, prompts[0], rows[0])
    assert_equal(reference, prompts[1], rows[1])
    assert_paths_equal(reference, prompts[2], DEEP, nodes, rows[2])
    assert_equal(reference, prompts[3], rows[3][:20])
    assert_paths_equal(reference, prompts[3], BUSHY, nodes[: len(BUSHY)], rows[3][20:])


DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 500.0}
WITHOUT: list[tuple[str, dict[str, Any]]] = [
    ("llama3-rope", {"rope_parameters": DEFAULT_ROPE}),
    ("llama-yarn", {"rope_parameters": DEFAULT_ROPE}),
    ("llama-biased", {"attention_bias": False}),
    ("qwen2-sliding", {"layer_types": ["full_attention"] * 3}),
    ("qwen3-biased", {"attention_bias": False}),
    ("gemma2", {"sliding_window": 1000}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma3", {"sliding_window": 1000}),
    (
        "gemma3",
        {"rope_parameters": dict.fromkeys(("sliding_attention", "full_attention"), DEFAULT_ROPE)},
    ),
    ("mistral", {"sliding_window": None}),
]


@pytest.mark.parametrize(("name", "changes"), WITHOUT)
def test_each_special_feature_shows_in_the_logits(name: str, changes: dict[str, Any]) -> None:
    """What the families are tested for is on, and far above the tolerance."""
    model = ReferenceModel(name)
    tokens = draw_tokens(37, 37)
    difference = model.compute_logits(tokens)[-1] - model.compute_logits_under(tokens, changes)
    assert difference.abs().max() > 100 * TOLERANCE


def test_the_narrow_window_ends_inside_the_deep_tree() -> None:
    depth = max(len(list_path(DEEP, DEEP, node)) for node in range(len(DEEP)))
    assert depth > NARROW_WINDOW
    assert BLOCK_SIZE < WINDOW < max(EDGE_LENGTHS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_reports_the_log_probs_of_the_plain_forward(
    reference: ReferenceModel, backend: str
) -> None:
    """Chunked prefill, free-running decode and an accepted tree, through the engine."""
    config = EngineConfig(
        num_blocks=64,
        block_size=BLOCK_SIZE,
        max_step_tokens=16,
        max_shared_prefill_tokens=16,
        backend=backend,
    )
    prompt = draw_tokens(5, 37)
    sampling = SamplingParams(temperature=1.0, max_tokens=64)
    answer, logprobs = _generate(reference, config, prompt, sampling)
    assert len(answer) > 6
    again, relogprobs = _generate(reference, config, prompt, sampling, proposed=answer)
    assert again == answer
    laws = reference.compute_logits(prompt + answer).log_softmax(dim=-1)
    expected = [laws[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
    np.testing.assert_allclose(logprobs, expected, atol=TOLERANCE)
    np.testing.assert_allclose(relogprobs, expected, atol=TOLERANCE)


def _generate(
    reference: ReferenceModel,
    config: EngineConfig,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    proposed: Sequence[int] = (),
) -> tuple[list[int], list[float]]:
    """Return up to ten answer tokens and their log-probs, free-running or from one chain."""
    engine = Engine(reference.loaded, build_byte_tokenizer(), config)
    opening = OpenSequence(
        sequence_id="a",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        mode=VerificationMode.COUPLED,
        random_key=bytes(range(16)),
    )
    engine.submit(opening)
    drain(engine)
    tree = build_tree([(0, [build_chain_branch(proposed[:-1])])]) if proposed else TokenTree.empty()
    num_free = 0 if proposed else 9
    engine.submit(VerifyTree(sequence_id="a", round=0, tree=tree, free_run_tokens=num_free))
    rounds = [event for event in drain(engine) if isinstance(event, RoundVerified)]
    if proposed:
        assert len(rounds) == 1
    tokens = [token for event in rounds for token in event.tokens]
    return [token.token_id for token in tokens], [token.logprob for token in tokens]
