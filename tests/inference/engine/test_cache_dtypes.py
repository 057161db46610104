"""Engines whose cache holds eight-bit keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    OpenSequence,
    RoundVerified,
    SamplingParams,
    SequenceOpened,
    VerifyTree,
)
from specrag_inference.testing import build_chain_branch, build_tree, drain

from tests.inference.models.families import ReferenceModel
from tests.inference.passes import Rig, Share, draw_tokens

if TYPE_CHECKING:
    from specrag_inference.engine import Engine
    from specrag_inference.engine_config import KvCacheDtype

    from tests.inference.engine.conftest import BuildEngine

DTYPES: list[KvCacheDtype] = ["int8", "fp8_e4m3"]
BACKENDS = ["dense", "sdpa", "flex"]
LARGEST_LOGIT_ERROR = {"int8": 0.3, "fp8_e4m3": 0.9}
"""In standard deviations of the logits, the worst of 5,180; twice what was measured."""


def open_sequence(engine: Engine, sequence_id: str, prompt: list[int], seed: int) -> SequenceOpened:
    engine.submit(
        OpenSequence(
            sequence_id=sequence_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(temperature=1.0, max_tokens=40),
            mode=VerificationMode.COUPLED,
            random_key=bytes([seed] * 16),
        )
    )
    (opened,) = drain(engine)
    assert isinstance(opened, SequenceOpened)
    return opened


def decode(engine: Engine, sequence_id: str, num_tokens: int) -> list[int]:
    command = VerifyTree(
        sequence_id=sequence_id,
        round=0,
        tree=TokenTree.empty(),
        free_run_tokens=num_tokens - 1,
    )
    engine.submit(command)
    return [
        token.token_id
        for event in drain(engine)
        if isinstance(event, RoundVerified)
        for token in event.tokens
    ]


def verify(engine: Engine, sequence_id: str, answer: list[int]) -> list[int]:
    """Commit ``answer`` round by round from trees of right and wrong branches."""
    committed: list[int] = []
    for index in range(len(answer)):
        rest = answer[len(committed) :]
        if not rest:
            break
        wrong = [(rest[0] + 1) % 256, 7]
        branches = [build_chain_branch(wrong), build_chain_branch(rest[: 1 + index % 4])]
        tree = build_tree([(0, branches[:1]), (1, branches[1:])])
        engine.submit(VerifyTree(sequence_id=sequence_id, round=index, tree=tree))
        for event in drain(engine):
            assert isinstance(event, RoundVerified)
            committed += [token.token_id for token in event.tokens]
    return committed[: len(answer)]


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(
    ("backend", "num_seeds"), [("dense", 3), ("sdpa", 3), ("flex", 1)], ids=BACKENDS
)
def test_proposals_change_no_token_of_the_target_as_configured(
    build_engine: BuildEngine, kind: KvCacheDtype, backend: str, num_seeds: int
) -> None:
    for seed in range(num_seeds):
        prompt = draw_tokens(seed, 30)
        alone = build_engine(kv_cache_dtype=kind, backend=backend)
        open_sequence(alone, "a", prompt, seed)
        answer = decode(alone, "a", 24)
        joint = build_engine(kv_cache_dtype=kind, backend=backend)
        open_sequence(joint, "a", prompt, seed)
        assert verify(joint, "a", answer) == answer
        assert len(answer) > 3


@pytest.mark.parametrize("kind", DTYPES)
def test_a_reused_prefix_gives_the_tokens_of_a_cold_one(
    build_engine: BuildEngine, kind: KvCacheDtype
) -> None:
    prompt = draw_tokens(3, 70)
    engine = build_engine(kv_cache_dtype=kind)
    assert open_sequence(engine, "cold", prompt, 5).num_cached_tokens == 0
    cold = decode(engine, "cold", 20)
    assert open_sequence(engine, "warm", prompt, 5).num_cached_tokens >= 48
    assert decode(engine, "warm", 20) == cold


@pytest.mark.congruence
@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral"])
def test_logits_stay_near_those_of_the_exact_cache(name: str, kind: KvCacheDtype) -> None:
    """All backends read the same cache; its rounding is what parts them from the exact one."""
    reference = ReferenceModel(name)
    tokens = draw_tokens(1, 60)
    results = []
    for backend in BACKENDS:
        rig = Rig(reference.loaded, backend, kv_cache_dtype=kind)
        table = rig.prefill(tokens[:40], chunk=20)
        results.append(rig.run([Share(table=table, chain=tokens[40:])])[0])
    exact = reference.compute_logits(tokens).numpy()[40:]
    error = np.abs(results[0] - exact).max()
    assert 0 < error < LARGEST_LOGIT_ERROR[kind] * exact.std()
    for other in results[1:]:
        assert np.abs(other - results[0]).max() < 0.2 * error


def test_prefixes_of_different_cache_dtypes_have_nothing_in_common(
    build_engine: BuildEngine,
) -> None:
    known = []
    for kind in ("auto", *DTYPES):
        engine = build_engine(kv_cache_dtype=kind)
        open_sequence(engine, "a", draw_tokens(1, 40), 0)
        known.append({block_hash for block_hash in engine.pool._hashes if block_hash})
    assert all(known)
    assert not set.intersection(*known)
    assert len(set.union(*known)) == 3 * len(known[0])
