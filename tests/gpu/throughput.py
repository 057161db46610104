"""Tokens a second through whole engines: drafting for one request, decoding for a crowd."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.engine import Engine, EngineConfig
from specrag_inference.messages import (
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    TokensProposed,
    VerifyTree,
)
from specrag_inference.testing import build_byte_tokenizer, drain

from tests.gpu.measuring import Finding, Setting, synchronize
from tests.inference.passes import draw_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from specrag_inference.models.loading import LoadedModel

DRAFT_BAR = 100.0
"""Tokens a second that one drafter is to draft."""

GAMMA = 8


def build_engine(model: LoadedModel, *, num_tokens: int, graphs: bool = False) -> Engine:
    """Return an engine with cache for ``num_tokens``."""
    config = EngineConfig(
        num_blocks=num_tokens // 16 + 64,
        block_size=16,
        max_step_tokens=2048,
        max_shared_prefill_tokens=512,
        backend="flex",
        cuda_graphs=graphs,
    )
    return Engine(model, build_byte_tokenizer(), config)


def check_drafter(
    name: str, model: LoadedModel, setting: Setting, *, graphs: bool = False
) -> Iterator[Finding]:
    """Draft bursts of :data:`GAMMA` tokens behind a long prompt, all of them committed."""
    context, num_rounds = (64, 3) if setting.tiny else (2048, 16)
    engine = build_engine(model, num_tokens=context + GAMMA * (num_rounds + 4), graphs=graphs)
    rate = measure_draft_rate(engine, setting, context=context, num_rounds=num_rounds)
    engine.close()
    yield Finding(
        name=f"drafting alone, {name}" + (", graphs" if graphs else ""),
        text=f"{rate:.0f} tokens/s in bursts of {GAMMA} at {context} tokens",
        passed=rate > DRAFT_BAR if setting.is_cuda else None,
    )


def measure_draft_rate(engine: Engine, setting: Setting, *, context: int, num_rounds: int) -> float:
    """Return drafted tokens a second; two rounds before the measured ones warm up."""
    engine.submit(_open("a", context))
    drain(engine)
    committed: tuple[int, ...] = ()
    started = num_drafted = 0
    for index in range(num_rounds + 2):
        if index == 2:
            synchronize(setting.device)
            started, num_drafted = time.perf_counter_ns(), 0
        engine.submit(
            ProposeTokens(sequence_id="a", round=index, committed_token_ids=committed, gamma=GAMMA)
        )
        (proposed,) = (event for event in drain(engine) if isinstance(event, TokensProposed))
        committed = proposed.branches[0].token_ids
        num_drafted += len(committed)
    synchronize(setting.device)
    return num_drafted / (time.perf_counter_ns() - started) * 1e9


def check_crowd(model: LoadedModel, setting: Setting, *, graphs: bool = False) -> Iterator[Finding]:
    """Decode many answers at once; one is the measure."""
    context, num_tokens = (48, 4) if setting.tiny else (1024, 32)
    alone = 0.0
    for count in (1, 2, 4) if setting.tiny else (1, 16, 32, 64):
        engine = build_engine(model, num_tokens=count * (context + num_tokens + 64), graphs=graphs)
        rate = measure_decode_rate(
            engine, setting, count=count, context=context, num_tokens=num_tokens
        )
        engine.close()
        alone = alone or rate
        yield Finding(
            name=f"decoding, {count} at once" + (", graphs" if graphs else ""),
            text=f"{rate:.0f} tokens/s, {rate / alone:.1f} times one",
            passed=rate > 3 * alone if count >= 16 else None,
        )


def measure_decode_rate(
    engine: Engine, setting: Setting, *, count: int, context: int, num_tokens: int
) -> float:
    """Return answer tokens a second of ``count`` sequences whose prompts are prefilled."""
    for index in range(count):
        engine.submit(_open(f"s{index}", context, seed=index))
    drain(engine)
    _decode(engine, count, round_index=0, num_tokens=4)
    synchronize(setting.device)
    started = time.perf_counter()
    num_decoded = _decode(engine, count, round_index=1, num_tokens=num_tokens)
    synchronize(setting.device)
    return num_decoded / (time.perf_counter() - started)


def _decode(engine: Engine, count: int, *, round_index: int, num_tokens: int) -> int:
    for index in range(count):
        engine.submit(
            VerifyTree(
                sequence_id=f"s{index}",
                round=round_index,
                tree=TokenTree.empty(),
                free_run_tokens=num_tokens - 1,
            )
        )
    rounds = [event for event in drain(engine) if isinstance(event, RoundVerified)]
    return sum(len(event.tokens) for event in rounds)


def _open(sequence_id: str, context: int, *, seed: int = 0) -> OpenSequence:
    return OpenSequence(
        sequence_id=sequence_id,
        prompt_token_ids=tuple(draw_tokens(seed, context)),
        sampling=SamplingParams(max_tokens=4096, temperature=1.0),
    )
