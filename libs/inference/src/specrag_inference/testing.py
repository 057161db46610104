"""Tiny random models and a byte-level tokenizer, for tests of the core and of the services.

The tokenizer has one token a byte and three specials, so every text can be encoded and a model
with random weights "speaks". Ids 0..255 are the bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from specrag_common.speculation.proposals import DraftBranch, DraftSource, SiblingKind
from specrag_common.speculation.token_tree import ROOT, NodeProposal, TokenTree
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from specrag_inference.attention.backends import ATTENTION_NAME, register_attention
from specrag_inference.models.loading import LoadedModel, describe_model
from specrag_inference.models.quiet import quiet_transformers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from transformers import PreTrainedConfig

    from specrag_inference.engine import Engine
    from specrag_inference.messages import EngineEvent

Family = Literal["llama", "qwen3", "gemma2"]

BYTE_VOCAB_SIZE = 259
"""256 bytes, end of text, start of turn, end of turn."""

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token a byte and a ChatML template."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, START_OF_TURN, END_OF_TURN])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token=END_OF_TEXT,
        bos_token=START_OF_TURN,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TURN,
        chat_template=_CHAT_TEMPLATE,
    )


def build_tiny_config(
    family: Family = "llama",
    *,
    vocab_size: int = BYTE_VOCAB_SIZE + 5,
    max_model_len: int = 1024,
    num_kv_heads: int = 2,
) -> PreTrainedConfig:
    """Return a small config: 2 layers (gemma2: one sliding, one full), 6 query heads.

    The default vocabulary is padded beyond the tokenizer's, as large models' are.
    """
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": num_kv_heads,
        "head_dim": 16,
        "max_position_embeddings": max_model_len,
        "initializer_range": 0.3,
        "bos_token_id": 257,
        "eos_token_id": 258,
        "pad_token_id": 258,
        "tie_word_embeddings": False,
    }
    if family == "llama":
        return LlamaConfig(**shape)
    if family == "qwen3":
        return Qwen3Config(**shape)
    return Gemma2Config(
        **shape,
        sliding_window=24,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )


def build_random_model(
    family: Family = "llama",
    *,
    seed: int = 0,
    vocab_size: int = BYTE_VOCAB_SIZE + 5,
    max_model_len: int = 1024,
    num_kv_heads: int = 2,
) -> LoadedModel:
    """Return a tiny fp32 model with random weights that depend on ``seed`` only."""
    config = build_tiny_config(
        family, vocab_size=vocab_size, max_model_len=max_model_len, num_kv_heads=num_kv_heads
    )
    register_attention()
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        torch.manual_seed(seed)
        module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    return describe_model(module, model_id=f"tiny-{family}-{seed}", revision=f"seed-{seed}")


def save_tiny_model(folder: Path, family: Family = "llama", *, seed: int = 0) -> Path:
    """Write a tiny random model with its byte tokenizer; ``folder`` is then a model reference."""
    model = build_random_model(family, seed=seed)
    with quiet_transformers():
        model.module.save_pretrained(folder)
        build_byte_tokenizer().save_pretrained(folder)
    return folder


def drain(engine: Engine) -> list[EngineEvent]:
    """Step the engine until it has nothing to do; return all its events."""
    events: list[EngineEvent] = []
    while engine.has_work:
        events += engine.step()
    return events


def build_tree(proposals: Iterable[tuple[int, Sequence[DraftBranch]]]) -> TokenTree:
    """Merge (drafter index, branches) into a token tree, all branches IID."""
    token_ids: list[int] = []
    parent_idx: list[int] = []
    merged: dict[tuple[int, int], int] = {}
    made = []
    for drafter_index, branches in proposals:
        for branch_idx, branch in enumerate(branches):
            parent = ROOT
            for token_id, law in zip(branch.token_ids, branch.laws, strict=True):
                if (parent, token_id) not in merged:
                    merged[parent, token_id] = len(token_ids)
                    token_ids.append(token_id)
                    parent_idx.append(parent)
                parent = merged[parent, token_id]
                made.append(
                    NodeProposal(
                        node_idx=parent,
                        drafter_index=drafter_index,
                        branch_idx=branch_idx,
                        law=law,
                        sibling_kind=SiblingKind.IID,
                    )
                )
    return TokenTree(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        parent_idx=np.asarray(parent_idx, dtype=np.int32),
        proposals=tuple(made),
    )


def build_chain_branch(token_ids: Sequence[int]) -> DraftBranch:
    """Return a DETERMINISTIC branch."""
    return DraftBranch(
        token_ids=tuple(token_ids), laws=(None,) * len(token_ids), source=DraftSource.MODEL
    )


def _byte_alphabet() -> list[str]:
    """Return the character that byte-level tokenizers use for each of the 256 bytes, in order.

    Printable Latin-1 bytes stand for themselves, the others are moved up from U+0100 in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = []
    moved = 0
    for byte in range(256):
        if byte in printable:
            alphabet.append(chr(byte))
        else:
            alphabet.append(chr(0x100 + moved))
            moved += 1
    return alphabet
