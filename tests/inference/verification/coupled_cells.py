"""COUPLED over the same kinds and processors: every tree that can be proposed, several seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.proposals import VerificationMode
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_inference.verification import walk_tree
from specrag_inference.verification.coupled import choose_coupled

from tests.inference.verification.exact_cells import build_round
from tests.inference.verification.toy_worlds import (
    Prefix,
    ToyModel,
    TreeLaws,
    enumerate_trees,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_LONGEST = 5


@dataclass(frozen=True, kw_only=True)
class CoupledCell:
    """What one cell found.

    Attributes:
        num_walks: trees times seeds.
        num_different: walks whose tokens are not those of the target alone.
    """

    num_walks: int
    num_different: int


def compare_with_alone(kind: str, processor: str, seeds: Iterable[int]) -> CoupledCell:
    """Walk every tree of a cell under every seed, and hold the tokens against no tree at all."""
    round_ = build_round(kind, processor, np.float32)
    trees = [tree for _, tree in enumerate_trees(round_)]
    num_walks = num_different = 0
    for seed in seeds:
        stream = RandomStream(random_key_from_seed(seed))
        alone = decode_alone(round_.target, stream)
        for tree in trees:
            result = walk_tree(
                tree,
                TreeLaws(round_.target),
                mode=VerificationMode.COUPLED,
                random=stream,
                position=0,
                stop_token_ids=round_.stop_token_ids,
            )
            accepted = [int(tree.token_ids[node]) for node in result.path]
            final = [] if result.final_token is None else [result.final_token]
            tokens = (*accepted, *final)
            num_walks += 1
            num_different += tokens != alone[: len(tokens)]
    return CoupledCell(num_walks=num_walks, num_different=num_different)


def decode_alone(target: ToyModel, stream: RandomStream) -> Prefix:
    """The target's own tokens for one stream."""
    tokens: Prefix = ()
    for position in range(_LONGEST):
        tokens = (*tokens, choose_coupled(target.law(tokens), stream, position=position))
    return tokens
