"""Commands as the engine tests send them, and what comes back put in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.token_tree import TokenTree
from specrag_inference.messages import (
    OpenSequence,
    ProposeTokens,
    RoundVerified,
    SamplingParams,
    ScoreTree,
    VerifyTree,
)
from specrag_inference.testing import build_chain_branch, build_tree

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from specrag_inference.messages import EngineEvent

TokenIds = tuple[int, ...]


def draw_tokens(seed: int, length: int) -> TokenIds:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 256, length))


def open_command(
    name: str,
    prompt: TokenIds,
    *,
    deadline_s: float | None = None,
    scope: bytes = b"",
    **sampling: object,
) -> OpenSequence:
    return OpenSequence(
        sequence_id=name,
        prompt_token_ids=prompt,
        cache_scope=scope,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        deadline_s=deadline_s,
    )


def decode_command(name: str, num_tokens: int) -> VerifyTree:
    return VerifyTree(
        sequence_id=name, round=0, tree=TokenTree.empty(), free_run_tokens=num_tokens - 1
    )


def verify_command(name: str, *branches: Sequence[int], round_: int = 0) -> VerifyTree:
    made = [build_chain_branch(branch) for branch in branches]
    return VerifyTree(sequence_id=name, round=round_, tree=build_tree([(0, made)]))


def propose_command(
    name: str, *, gamma: int, committed: TokenIds = (), num_branches: int = 1, round_: int = 0
) -> ProposeTokens:
    return ProposeTokens(
        sequence_id=name,
        round=round_,
        committed_token_ids=committed,
        gamma=gamma,
        num_branches=num_branches,
    )


def score_chain_command(name: str, token_ids: Sequence[int]) -> ScoreTree:
    return ScoreTree(
        sequence_id=name,
        score_id=0,
        token_ids=np.asarray(token_ids, dtype=np.int32),
        parent_idx=np.arange(-1, len(token_ids) - 1, dtype=np.int32),
    )


def list_tokens(events: Iterable[EngineEvent], name: str | None = None) -> list[int]:
    return [
        token.token_id
        for event in events
        if isinstance(event, RoundVerified) and name in {None, event.sequence_id}
        for token in event.tokens
    ]
