"""What is kept of the models: enough to replay any round of any set of drafters offline.

A drafter's proposal behind ``t`` committed answer tokens depends on its prompt, those tokens and
the random key only. Along the committed answer its next token is what one pass over the answer
gives; where it leaves the answer, nothing behind it can be accepted. So one pass a drafter and
answer holds everything that decides how much is accepted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray


class Temperature(StrEnum):
    """Which of the two answers."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTrace:
    """The target on one question.

    Attributes:
        prompt_ids: [num_prompt_tokens] all passages.
        greedy_ids: [num_greedy] answer at temperature 0.
        sampled_ids: [num_sampled] answer at temperature 1, coupled to the question's key.
        sampled_laws: [num_sampled, vocab_size] float32, what each sampled token was drawn from.
    """

    prompt_ids: NDArray[np.int32]
    greedy_ids: NDArray[np.int32]
    sampled_ids: NDArray[np.int32]
    sampled_laws: NDArray[np.float32]

    def get_answer(self, temperature: Temperature) -> NDArray[np.int32]:
        """Return the answer of a temperature."""
        return self.greedy_ids if temperature is Temperature.GREEDY else self.sampled_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterTrace:
    """One drafter on one question, along both of the target's answers.

    Attributes:
        prompt_ids: [num_prompt_tokens] its passages.
        greedy_choices: [num_greedy, num_ranks] its tokens by rank, temperature 0.
        coupled_choices: [num_sampled, num_ranks] by rank, temperature 1, coupled to the target.
        law_ids: [num_sampled, max_support] ids of its law at temperature 1, ascending; -1 pads.
        law_probs: [num_sampled, max_support] float32; 0 pads.
    """

    prompt_ids: NDArray[np.int32]
    greedy_choices: NDArray[np.int32]
    coupled_choices: NDArray[np.int32]
    law_ids: NDArray[np.int32]
    law_probs: NDArray[np.float32]

    def get_choices(self, temperature: Temperature) -> NDArray[np.int32]:
        """Return the tokens by rank along the answer of a temperature."""
        is_greedy = temperature is Temperature.GREEDY
        return self.greedy_choices if is_greedy else self.coupled_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionTrace:
    """Target and drafters on one question; drafters by the passages they read."""

    question_id: str
    target: TargetTrace
    drafters: dict[tuple[int, ...], DrafterTrace]


def name_drafter(passages: Sequence[int]) -> str:
    """Return the file stem of the drafter that reads these passages (from 0)."""
    return "drafter-" + "-".join(map(str, passages))


def save_trace(path: Path, trace: TargetTrace | DrafterTrace) -> None:
    """Write one trace; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, **asdict(trace))
    partial.rename(path)


def load_target(path: Path) -> TargetTrace:
    """Read what :func:`save_trace` wrote of a target."""
    with np.load(path) as arrays:
        return TargetTrace(**dict(arrays))


def load_drafter(path: Path) -> DrafterTrace:
    """Read what :func:`save_trace` wrote of a drafter."""
    with np.load(path) as arrays:
        return DrafterTrace(**dict(arrays))


def load_traces(folder: Path) -> list[QuestionTrace]:
    """Return every question whose target has answered, with the drafters recorded so far."""
    return [
        QuestionTrace(
            question_id=path.parent.name,
            target=load_target(path),
            drafters={
                _parse_passages(drafter.stem): load_drafter(drafter)
                for drafter in sorted(path.parent.glob("drafter-*.npz"))
                if ".partial" not in drafter.name
            },
        )
        for path in sorted(folder.glob("*/target.npz"))
    ]


def _parse_passages(stem: str) -> tuple[int, ...]:
    return tuple(int(part) for part in stem.removeprefix("drafter-").split("-"))
