"""The cells of the exactness table: processors x ways of proposing x node orders x dtypes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.speculation.proposals import DraftBranch, DraftLaw, DraftProposal, DraftSource
from specrag_inference.messages import SamplingParams

from tests.inference.verification.toy_worlds import (
    RULES,
    Draft,
    Prefix,
    Round,
    ToyModel,
    choose_by_looking,
    choose_greedy,
    draft_deterministic,
    draft_ending_early,
    draft_iid,
    draft_without_replacement,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specrag_common.speculation.token_tree import TokenTree

Dtype = type[np.float32] | type[np.float64]

PROCESSORS: dict[str, tuple[SamplingParams, SamplingParams]] = {
    "plain": (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0)),
    "cold target": (SamplingParams(temperature=0.6), SamplingParams(temperature=1.3)),
    "top-k": (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_k=2)),
    "top-p": (
        SamplingParams(temperature=1.2, top_p=0.7),
        SamplingParams(temperature=1.2, top_p=0.9),
    ),
    "top-k and top-p": (
        SamplingParams(temperature=0.9, top_k=3, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=3, top_p=0.8),
    ),
    "greedy target": (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)),
    "min-p": (
        SamplingParams(temperature=1.1, min_p=0.35),
        SamplingParams(temperature=1.1, min_p=0.2),
    ),
    "repetition": (
        SamplingParams(temperature=1.0, repetition_penalty=1.8),
        SamplingParams(temperature=1.0, repetition_penalty=1.3),
    ),
    "presence and frequency": (
        SamplingParams(temperature=1.0, presence_penalty=0.9, frequency_penalty=0.7),
        SamplingParams(temperature=1.0, presence_penalty=0.9, frequency_penalty=0.7),
    ),
    "logit bias": (
        SamplingParams(temperature=1.0, logit_bias=((0, 1.5), (1, -1.0))),
        SamplingParams(temperature=1.0),
    ),
    "minimum length": (
        SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=frozenset({0})),
        SamplingParams(temperature=1.0, min_tokens=1, stop_token_ids=frozenset({0})),
    ),
    "greedy with penalties": (
        SamplingParams(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.2),
        SamplingParams(temperature=1.0, repetition_penalty=2.0, frequency_penalty=1.2),
    ),
    "everything": (
        SamplingParams(
            temperature=1.3,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            repetition_penalty=0.7,
            presence_penalty=-0.8,
            frequency_penalty=0.6,
            logit_bias=((1, 0.7),),
            min_tokens=1,
            stop_token_ids=frozenset({0}),
        ),
        SamplingParams(temperature=1.0, repetition_penalty=0.7, frequency_penalty=0.6),
    ),
}
"""Name to (target's parameters, drafters' parameters)."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Models of one cell."""

    target: ToyModel
    drafters: tuple[ToyModel, ...]


def build_world(
    processor: str,
    dtype: Dtype,
    *,
    vocab_size: int = 3,
    seed: int = 7,
    max_support: int | None = None,
) -> World:
    """Random tables for a target and three drafters."""
    target_params, draft_params = PROCESSORS[processor]
    return World(
        target=ToyModel(seed=seed, vocab_size=vocab_size, params=target_params, dtype=dtype),
        drafters=tuple(
            ToyModel(
                seed=seed + 1 + idx,
                vocab_size=vocab_size,
                params=draft_params,
                dtype=dtype,
                max_support=max_support,
            )
            for idx in range(3)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way of proposing."""

    build: Callable[[tuple[ToyModel, ...]], Sequence[Draft]]
    vocab_size: int = 3
    max_support: int | None = None
    max_draft_tokens: int = 64
    change_proposals: Callable[[list[DraftProposal]], list[DraftProposal]] = list
    stop_token_ids: frozenset[int] = frozenset()
    distrusted_drafters: frozenset[int] = frozenset()


def sample_iid(*num_branches: int) -> Callable[[tuple[ToyModel, ...]], list[Draft]]:
    """One sampling drafter for each entry, with that many independent branches."""

    def build(models: tuple[ToyModel, ...]) -> list[Draft]:
        return [
            draft_iid(models[idx], idx, num_branches=count)
            for idx, count in enumerate(num_branches)
        ]

    return build


def declare_deterministic(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """Drop every law."""
    return [
        map_branches(proposal, lambda branch: replace(branch, laws=(None,) * len(branch.token_ids)))
        for proposal in proposals
    ]


def cut_unlikely(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """Cut each branch before its first token that was unlikely: a confidence cut after drawing."""
    return [
        replace(proposal, branches=tuple(filter(None, map(_cut_branch, proposal.branches))))
        for proposal in proposals
    ]


def map_branches(
    proposal: DraftProposal, change: Callable[[DraftBranch], DraftBranch]
) -> DraftProposal:
    """Apply ``change`` to every branch."""
    return replace(proposal, branches=tuple(change(branch) for branch in proposal.branches))


def misstate_law(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """State, for the first drafter, laws that leave out the very tokens it drew."""

    def change(branch: DraftBranch) -> DraftBranch:
        return replace(
            branch,
            laws=tuple(
                None if law is None else _leave_out(law, token_id)
                for token_id, law in zip(branch.token_ids, branch.laws, strict=True)
            ),
        )

    return [map_branches(proposals[0], change), *proposals[1:]]


def permute_nodes(tree: TokenTree) -> TokenTree:
    """Number the nodes level by level, backwards within a level, and reverse the proposals."""
    levels = tree.compute_levels()
    order = sorted(range(tree.num_nodes), key=lambda node: (levels[node], -node))
    permuted = tree.permuted(order)
    return replace(permuted, proposals=permuted.proposals[::-1])


def _mix_kinds(models: tuple[ToyModel, ...]) -> list[Draft]:
    """A greedy drafter with the lowest index, then a sampling one."""
    return [
        draft_deterministic(choose_greedy(models[0]), 0),
        draft_iid(models[1], 1, num_branches=1),
        draft_iid(models[2], 2, num_branches=1),
    ]


def _look(models: tuple[ToyModel, ...]) -> list[Draft]:
    """A sampling drafter, and one with a lower index that copies what it drew."""
    return [
        draft_iid(models[0], 1, num_branches=1),
        draft_deterministic(choose_by_looking, 0),
        draft_iid(models[1], 2, num_branches=1),
    ]


def _replace_second_branch(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """Let the first drafter's second branch be fixed, and its first one end in a fixed token."""
    first, second = proposals[0].branches
    first = replace(first, token_ids=(first.token_ids[0], 1), laws=(first.laws[0], None))
    second = replace(second, token_ids=(2, 0), laws=(None, None))
    return [replace(proposals[0], branches=(first, second)), *proposals[1:]]


def _fixed(models: tuple[ToyModel, ...]) -> list[Draft]:
    """Branches fixed beforehand, as a suffix match gives, with a duplicate among them."""
    fixed: list[Prefix] = [(0, 1), (2, 2), (0, 1), (1,)]
    return [
        draft_deterministic(lambda _earlier: fixed, 0),
        draft_deterministic(lambda _earlier: [(1, 0)], 1),
    ]


def _fix_last_token(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """Let the first drafter's branches end in a fixed token."""
    branches = tuple(
        replace(branch, token_ids=(*branch.token_ids[:-1], 1), laws=(*branch.laws[:-1], None))
        for branch in proposals[0].branches
    )
    return [replace(proposals[0], branches=branches), *proposals[1:]]


def _put_fixed_branch_first(proposals: list[DraftProposal]) -> list[DraftProposal]:
    """Let the first drafter's branches begin with a fixed one, which its draws know nothing of."""
    fixed = DraftBranch(token_ids=(1, 0), laws=(None, None), source=DraftSource.SUFFIX)
    branches = (fixed, *proposals[0].branches)
    return [replace(proposals[0], branches=branches), *proposals[1:]]


def _look_at_everything(models: tuple[ToyModel, ...]) -> list[Draft]:
    """Two sampling drafters, and one whose branches depend on all they drew."""

    def choose(earlier: list[DraftProposal]) -> list[Prefix]:
        drawn = [token for one in earlier for branch in one.branches for token in branch.token_ids]
        return [(drawn[0], drawn[3]), (drawn[2], sum(drawn) % 3), (sum(drawn) % 2, drawn[1])]

    return [
        draft_iid(models[0], 0, num_branches=1),
        draft_iid(models[1], 1, num_branches=1),
        draft_deterministic(choose, 2),
    ]


def _tree_and_chain(models: tuple[ToyModel, ...]) -> list[Draft]:
    return [
        draft_without_replacement(models[0], 0, num_roots=2, num_children=1),
        draft_iid(models[1], 1, num_branches=1),
    ]


KINDS: dict[str, Kind] = {
    "one chain": Kind(build=sample_iid(1), vocab_size=6),
    "one chain of three": Kind(
        build=lambda models: [draft_iid(models[0], 0, num_branches=1, depth=3)]
    ),
    "one chain, capped laws": Kind(build=sample_iid(1), vocab_size=6, max_support=2),
    "one chain that ends early": Kind(
        build=lambda models: [draft_ending_early(models[0], 0, num_branches=1)], vocab_size=5
    ),
    "one chain through a stop token": Kind(
        build=lambda models: [draft_iid(models[0], 0, num_branches=1, depth=3)],
        stop_token_ids=frozenset({0}),
    ),
    "one chain, its last token fixed": Kind(
        build=sample_iid(1), vocab_size=5, change_proposals=_fix_last_token
    ),
    "two drafters": Kind(build=sample_iid(1, 1), vocab_size=4),
    "three drafters": Kind(
        build=lambda models: [
            draft_iid(model, idx, num_branches=1, depth=depth)
            for idx, (model, depth) in enumerate(zip(models, (1, 2, 1), strict=True))
        ]
    ),
    "two branches, iid": Kind(build=sample_iid(2), vocab_size=4),
    "three branches, iid": Kind(
        build=lambda models: [draft_iid(models[0], 0, num_branches=3, depth=1)], vocab_size=4
    ),
    "two branches of three, iid": Kind(
        build=lambda models: [draft_iid(models[0], 0, num_branches=2, depth=3)], vocab_size=2
    ),
    "branches through a stop token": Kind(build=sample_iid(2, 1), stop_token_ids=frozenset({1})),
    "two branches and a drafter": Kind(
        build=lambda models: [
            draft_iid(models[0], 0, num_branches=2),
            draft_iid(models[1], 1, num_branches=1, depth=1),
        ]
    ),
    "capped laws": Kind(build=sample_iid(1, 1), vocab_size=5, max_support=2),
    "siblings without replacement": Kind(
        build=lambda models: [draft_without_replacement(models[0], 0, num_roots=2, num_children=1)],
        vocab_size=4,
    ),
    "all siblings without replacement": Kind(
        build=lambda models: [draft_without_replacement(models[0], 0, num_roots=3, num_children=1)],
    ),
    "children without replacement": Kind(
        build=lambda models: [draft_without_replacement(models[0], 0, num_roots=2, num_children=2)],
    ),
    "tree without replacement and a chain": Kind(build=_tree_and_chain),
    "fixed branch before siblings without replacement": Kind(
        build=lambda models: [draft_without_replacement(models[0], 0, num_roots=2, num_children=1)],
        change_proposals=_put_fixed_branch_first,
    ),
    "greedy chain": Kind(
        build=lambda models: [draft_deterministic(choose_greedy(models[0]), 0)], vocab_size=6
    ),
    "top-k branches": Kind(
        build=lambda models: [draft_deterministic(choose_greedy(models[0], num_branches=3), 0)],
        vocab_size=5,
    ),
    "fixed branches": Kind(build=_fixed, vocab_size=4),
    "greedy and sampled": Kind(build=_mix_kinds),
    "mixed kinds in one proposal": Kind(
        build=sample_iid(2, 1), change_proposals=_replace_second_branch
    ),
    "deterministic after looking": Kind(build=_look),
    "deterministic after looking at everything": Kind(build=_look_at_everything),
    "confidence cut, declared deterministic": Kind(
        build=sample_iid(1, 1),
        change_proposals=lambda proposals: declare_deterministic(cut_unlikely(proposals)),
    ),
    "budget before merging": Kind(build=sample_iid(2, 1), max_draft_tokens=4),
    "branches that end early": Kind(
        build=lambda models: [
            draft_ending_early(models[0], 0, num_branches=2),
            draft_ending_early(models[1], 1, num_branches=1),
        ],
        max_draft_tokens=4,
    ),
    "misstated laws": Kind(build=sample_iid(1, 1), change_proposals=misstate_law),
    "distrusted drafter": Kind(build=sample_iid(1, 1), distrusted_drafters=frozenset({0})),
}


def build_round(
    kind: str,
    processor: str,
    dtype: Dtype,
    *,
    rule: str = "as chosen",
    permuted: bool = False,
    seed: int = 7,
) -> Round:
    """The round of one cell."""
    spec = KINDS[kind]
    world = build_world(
        processor, dtype, vocab_size=spec.vocab_size, seed=seed, max_support=spec.max_support
    )
    return Round(
        target=world.target,
        drafters=spec.build(world.drafters),
        max_draft_tokens=spec.max_draft_tokens,
        change_proposals=spec.change_proposals,
        change_tree=permute_nodes if permuted else lambda tree: tree,
        make_rule=RULES[rule],
        stop_token_ids=spec.stop_token_ids | PROCESSORS[processor][0].stop_token_ids,
        distrusted_drafters=spec.distrusted_drafters,
    )


def _cut_branch(branch: DraftBranch) -> DraftBranch | None:
    for idx, (token_id, law) in enumerate(zip(branch.token_ids, branch.laws, strict=True)):
        if law is not None and law.probs[list(law.token_ids).index(token_id)] < 0.35:
            return branch.cut(idx) if idx else None
    return branch


def _leave_out(law: DraftLaw, token_id: int) -> DraftLaw | None:
    kept = law.token_ids != token_id
    if not kept.any():
        return None
    probs = law.probs[kept]
    return DraftLaw(token_ids=law.token_ids[kept], probs=probs / probs.sum())
