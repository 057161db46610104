"""The sets of drafters that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from bench.merging.coupled_rounds import (
    DeviatingDrafter,
    ModelDrafter,
    SuffixSource,
    Tally,
    replay_rounds,
)
from bench.merging.rejection_rounds import replay_rejection
from bench.merging.subsets import NUMBERS_OF_DRAFTERS, split_by_number, split_with_best

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.merging.coupled_rounds import Drafter
    from bench.merging.traces import QuestionTrace, Temperature
    from bench.question_sets import ClosedQuestion

GAMMA = 8
UNLIMITED_NODES = 4096
NUM_REJECTION_DRAWS = 16


class Split(StrEnum):
    """Who reads what."""

    ALL = "all passages"
    SINGLE = "one of the subsets"
    NUMBERED = "subsets"
    WITH_BEST = "subsets, the two best passages in each"
    MIXED = "subsets, and one drafter over all"


class Branching(StrEnum):
    """What a draft model proposes."""

    NOTHING = "nothing"
    CHAIN = "one branch"
    SECOND = "two branches"
    DEVIATING = "branches that leave the best path once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One set of drafters.

    Attributes:
        num_drafters: subsets the passages are split into.
        split: who reads what.
        branching: what each draft model proposes.
        has_suffix: whether every drafter also copies from what it reads.
        gamma: most tokens a branch.
        max_nodes: budget of proposed tokens a round.
    """

    num_drafters: int = 1
    split: Split = Split.ALL
    branching: Branching = Branching.CHAIN
    has_suffix: bool = False
    gamma: int = GAMMA
    max_nodes: int = UNLIMITED_NODES

    @property
    def name(self) -> str:
        """What a table calls it."""
        many = f"{self.num_drafters} {self.split}"
        parts = [str(self.split) if self.split is Split.ALL else many]
        if self.branching is not Branching.CHAIN:
            parts.append(f"model: {self.branching}")
        if self.has_suffix:
            parts.append("suffix")
        if self.gamma != GAMMA:
            parts.append(f"gamma {self.gamma}")
        if self.max_nodes != UNLIMITED_NODES:
            parts.append(f"at most {self.max_nodes} tokens")
        return ", ".join(parts)

    @property
    def is_merged(self) -> bool:
        """Whether several draft models' branches meet in one tree."""
        has_model = self.branching is not Branching.NOTHING
        return has_model and self.split not in {Split.ALL, Split.SINGLE}

    def list_teams(self, question: ClosedQuestion) -> list[list[tuple[int, ...]]]:
        """Return the passages of each drafter; several teams are averaged over."""
        num_passages = len(question.passages)
        everything = tuple(range(num_passages))
        subsets = split_by_number(num_passages, self.num_drafters)
        match self.split:
            case Split.ALL:
                return [[everything]]
            case Split.SINGLE:
                return [[subset] for subset in subsets]
            case Split.NUMBERED:
                return [subsets]
            case Split.MIXED:
                return [[*subsets, everything]]
            case Split.WITH_BEST:
                return [split_with_best(question, self.num_drafters)]

    def replay(
        self, trace: QuestionTrace, question: ClosedQuestion, temperature: Temperature
    ) -> Tally:
        """Return the rounds of one question at temperature 0, or in COUPLED mode."""
        answer_ids = trace.target.get_answer(temperature).tolist()
        tally = Tally()
        for team in self.list_teams(question):
            tally += replay_rounds(
                answer_ids,
                list(self._build_drafters(trace, team, temperature)),
                gamma=self.gamma,
                max_nodes=self.max_nodes,
            )
        return tally

    def replay_rejection(self, trace: QuestionTrace, question: ClosedQuestion) -> Tally | None:
        """Return the rounds in REJECTION mode, temperature 1; ``None``: not a set it is for."""
        if self.branching in {Branching.SECOND, Branching.DEVIATING}:
            return None
        if self.max_nodes != UNLIMITED_NODES:
            return None
        tally, rng = Tally(), np.random.default_rng(0)
        answer_ids = trace.target.sampled_ids.tolist()
        for team in self.list_teams(question):
            has_model = self.branching is Branching.CHAIN
            models = [trace.drafters[one] for one in team] if has_model else []
            copiers = [
                SuffixSource(trace.drafters[one].prompt_ids.tolist(), answer_ids, gamma=self.gamma)
                for one in team
                if self.has_suffix
            ]
            for _ in range(NUM_REJECTION_DRAWS):
                tally += replay_rejection(trace.target, models, copiers, gamma=self.gamma, rng=rng)
        return tally

    def _build_drafters(
        self, trace: QuestionTrace, team: Sequence[tuple[int, ...]], temperature: Temperature
    ) -> Iterator[Drafter]:
        answer_ids = trace.target.get_answer(temperature).tolist()
        for passages in team:
            drafter = trace.drafters[passages]
            choices = drafter.get_choices(temperature)
            match self.branching:
                case Branching.CHAIN:
                    yield ModelDrafter(choices, answer_ids)
                case Branching.SECOND:
                    yield ModelDrafter(choices, answer_ids, num_branches=2)
                case Branching.DEVIATING:
                    yield DeviatingDrafter(choices, answer_ids, max_depth=self.gamma)
                case Branching.NOTHING:
                    pass
            if self.has_suffix:
                yield SuffixSource(drafter.prompt_ids.tolist(), answer_ids, gamma=self.gamma)


def list_main() -> list[Configuration]:
    """Return what is asked for: one drafter, one subset, merged; with and without suffix."""
    plain = [
        Configuration(),
        *(Configuration(num_drafters=number, split=Split.SINGLE) for number in NUMBERS_OF_DRAFTERS),
        *(
            Configuration(num_drafters=number, split=Split.NUMBERED)
            for number in NUMBERS_OF_DRAFTERS
        ),
    ]
    with_suffix = [
        Configuration(num_drafters=one.num_drafters, split=one.split, has_suffix=True)
        for one in plain
    ]
    alone = [
        Configuration(branching=Branching.NOTHING, has_suffix=True),
        Configuration(
            num_drafters=4, split=Split.NUMBERED, branching=Branching.NOTHING, has_suffix=True
        ),
    ]
    return [*plain, *with_suffix, *alone]


def list_further() -> list[Configuration]:
    """Return other ways to get more tokens a round."""
    ways = []
    for number in (1, 4, 5):
        split = Split.ALL if number == 1 else Split.NUMBERED
        ways += [
            Configuration(num_drafters=number, split=split, branching=branching, has_suffix=True)
            for branching in (Branching.SECOND, Branching.DEVIATING)
        ]
    ways += [
        Configuration(num_drafters=5, split=Split.NUMBERED, has_suffix=True, gamma=gamma)
        for gamma in (12, 16)
    ]
    ways += [
        Configuration(num_drafters=4, split=Split.MIXED, has_suffix=True),
        Configuration(num_drafters=5, split=Split.MIXED, has_suffix=True),
        Configuration(num_drafters=5, split=Split.NUMBERED, has_suffix=True, max_nodes=32),
        Configuration(num_drafters=5, split=Split.NUMBERED, has_suffix=True, max_nodes=64),
    ]
    return ways


def list_with_best() -> list[Configuration]:
    """Return the sets whose drafters share the passages most like the question."""
    return [
        Configuration(num_drafters=5, split=Split.WITH_BEST, has_suffix=suffix)
        for suffix in (False, True)
    ]
