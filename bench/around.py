"""What a round costs outside the forward pass: indexing, proposing, merging, walking.

Usage: python -m bench.around [--vocab-size 49152]

Random tokens and logits; medians of ``--repeats``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from specrag_common.speculation.merge import merge_proposals
from specrag_common.speculation.proposals import (
    DraftBranch,
    DraftProposal,
    DraftSource,
    VerificationMode,
)
from specrag_common.speculation.randomness import RandomStream
from specrag_common.speculation.suffix_drafter import SuffixDrafter
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.processors import compute_law
from specrag_inference.verification import walk_tree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

SUBSET_TOKENS = 8000
NUM_DRAFTERS = 3
GAMMA = 8
SPREAD = 3.0
MATCH_LOGIT = 30.0


class AcceptingLaws:
    """Laws under which every token of the first drafter's branch is all but certain."""

    def __init__(
        self, branch: Sequence[int], vocab_size: int, sampling: SamplingParams, seed: int
    ) -> None:
        rng = np.random.default_rng(seed)
        self._rows = SPREAD * rng.standard_normal((len(branch) + 1, vocab_size), dtype=np.float32)
        for row, token_id in zip(self._rows, branch, strict=False):
            row[token_id] = MATCH_LOGIT
        self._sampling = sampling

    def law_at(self, node_idx: int, path: Sequence[int]) -> NDArray[np.floating[Any]]:  # noqa: ARG002 - part of the seam
        """Process the row of the path's depth."""
        return compute_law(self._rows[len(path)], self._sampling)


def measure(call: Callable[[], object], repeats: int) -> float:
    """Return the median milliseconds of a call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--repeats", type=int, default=51)
    arguments = parser.parse_args()
    rng = np.random.default_rng(7)
    subset = rng.zipf(1.3, SUBSET_TOKENS).clip(max=arguments.vocab_size - 1).tolist()
    drafter = SuffixDrafter(subset)
    drafter.extend(subset[1000:1020])  # an answer that copies from it
    branches = [rng.integers(0, arguments.vocab_size, GAMMA).tolist() for _ in range(NUM_DRAFTERS)]
    proposals = [_proposal(index, branch) for index, branch in enumerate(branches)]
    tree = merge_proposals(proposals, max_draft_tokens=NUM_DRAFTERS * GAMMA)
    for name, call, repeats in (
        ("suffix index of 8,000 tokens", partial(SuffixDrafter, subset), 11),
        ("suffix proposal", partial(drafter.propose, GAMMA), arguments.repeats),
        (
            "merge of 3 branches of 8",
            partial(merge_proposals, proposals, max_draft_tokens=NUM_DRAFTERS * GAMMA),
            arguments.repeats,
        ),
    ):
        print(f"{name}: {measure(call, repeats):.3f} ms")
    for name, sampling in (
        ("temperature 0", SamplingParams()),
        ("temperature 1", SamplingParams(temperature=1.0)),
        ("temperature 1, top-p 0.9", SamplingParams(temperature=1.0, top_p=0.9)),
    ):
        laws = AcceptingLaws(branches[0], arguments.vocab_size, sampling, seed=7)
        for mode in VerificationMode:
            walk = partial(
                walk_tree, tree, laws, mode=mode, random=RandomStream(bytes(16)), position=0
            )
            milliseconds = measure(walk, arguments.repeats)
            print(
                f"walk of {tree.num_nodes} nodes, {len(walk().path)} accepted, {name}, {mode}: "
                f"{milliseconds:.2f} ms"
            )


def _proposal(index: int, token_ids: Sequence[int]) -> DraftProposal:
    branch = DraftBranch(
        token_ids=tuple(token_ids), laws=(None,) * len(token_ids), source=DraftSource.SUFFIX
    )
    return DraftProposal(
        drafter_index=index, committed_length=0, branches=(branch,), gamma=len(token_ids)
    )


if __name__ == "__main__":
    main()
