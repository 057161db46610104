"""Opens an engine as it was planned, on one rank or several."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from transformers import AutoConfig

from specrag_inference.cache.quantized import SCALE_BYTES
from specrag_inference.engine import Engine
from specrag_inference.models.loading import (
    load_folder,
    load_model,
    load_tokenizer,
    resolve_dtype,
)
from specrag_inference.models.quantization import check_quantization
from specrag_inference.parallel.degree import check_tp_size
from specrag_inference.parallel.followers import FollowerRanks
from specrag_inference.parallel.process_group import (
    join_group,
    leave_group,
    limit_collectives,
    share_threads,
)
from specrag_inference.parallel.runner import ParallelRunner
from specrag_inference.runner import ModelRunner, TokenVocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedConfig

    from specrag_inference.engine_config import EngineConfig
    from specrag_inference.models.loading import LoadedModel
    from specrag_inference.plan import EnginePlan

_MIB: Final = 1024 * 1024


@contextmanager
def opened_engine(plan: EnginePlan, *, on_loss: Callable[[str], None]) -> Iterator[Engine]:
    """Load the model and yield its engine; further ranks live as long as the block runs.

    Args:
        plan: what to load.
        on_loss: gets a reason, in a thread, when a rank is lost; it should end the process, which
            may be inside a collective that never returns.

    Raises:
        ModelReferenceError: the reference names nothing.
        TensorParallelError: the model cannot be split as planned.
        QuantizationError: this machine cannot quantise as planned.
        RankLostError: a rank could not load its share.
    """
    plan = resolve_plan(plan)
    tokenizer = load_tokenizer(plan.model, plan.cache_dir)
    if plan.tp_size == 1:
        yield Engine(_load(plan), tokenizer, plan.engine)
        return
    followers = FollowerRanks(plan, on_loss=on_loss)
    try:
        join_group(followers.place)
        model = _load(plan)
        followers.wait_ready()
        limit_collectives()
        vocabulary = TokenVocabulary.from_ids(tokenizer.get_vocab().values(), model.vocab_size)
        local = _build_rank_runner(model, vocabulary, plan.engine)
        runner = ParallelRunner(local, followers)
        yield Engine(model, tokenizer, plan.engine, runner=runner)
    finally:
        followers.close()
        leave_group()


def load_follower_runner(plan: EnginePlan) -> ModelRunner:
    """Load this rank's share and return its runner; call it in the process group.

    Args:
        plan: resolved by rank 0.
    """
    model = _load(plan)
    everything = TokenVocabulary(size=model.vocab_size, holes=np.empty(0, dtype=np.int64))
    return _build_rank_runner(model, everything, plan.engine)


def resolve_plan(plan: EnginePlan) -> EnginePlan:
    """Check the plan against model and machine, and turn its cache memory into blocks.

    Raises:
        ModelReferenceError: the reference names nothing.
        TensorParallelError: the model cannot be split as planned.
        QuantizationError: this machine cannot quantise as planned.
    """
    _, folder = load_folder(plan.model, plan.cache_dir)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_tp_size(config, plan.tp_size)
    check_quantization(plan.quantization, tp_size=plan.tp_size)
    if plan.kv_cache_mib is None:
        return plan
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if plan.engine.kv_cache_dtype == "auto":
        token_bytes = count_token_bytes(config, resolve_dtype(plan.dtype, device).itemsize)
    else:
        token_bytes = count_token_bytes(config, 1, scale_bytes=SCALE_BYTES)
    num_blocks = plan.kv_cache_mib * _MIB // (token_bytes * plan.engine.block_size)
    engine = replace(plan.engine, num_blocks=max(1, num_blocks))
    return replace(plan, engine=engine, kv_cache_mib=None)


def count_token_bytes(config: PreTrainedConfig, element_bytes: int, *, scale_bytes: int = 0) -> int:
    """Return the bytes that keys and values of one token take over all ranks.

    Args:
        config: of the model.
        element_bytes: bytes of a number.
        scale_bytes: bytes that each head has besides its numbers.
    """
    config = config.get_text_config()
    num_heads = config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    head_bytes = head_dim * element_bytes + scale_bytes
    return int(2 * config.num_hidden_layers * num_kv_heads * head_bytes)


def _load(plan: EnginePlan) -> LoadedModel:
    num_threads = plan.num_threads
    if plan.tp_size > 1:
        num_threads = share_threads(num_threads, plan.tp_size)
    return load_model(
        plan.model,
        dtype=plan.dtype,
        cache_dir=plan.cache_dir,
        num_threads=num_threads,
        tp_size=plan.tp_size,
        quantization=plan.quantization,
    )


def _build_rank_runner(
    model: LoadedModel, vocabulary: TokenVocabulary, config: EngineConfig
) -> ModelRunner:
    """Return the runner of one rank of several, whose layers stay transformers' own."""
    return ModelRunner(
        model,
        vocabulary,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        backend=config.backend,
        fuse=False,
        cuda_graphs=config.cuda_graphs,
        kv_cache_dtype=config.kv_cache_dtype,
    )
