"""Runs target and drafters over the questions and writes their traces; picks up where it ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from specrag_common.conversation import PromptPassage
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_inference.drafting import MAX_LAW_SUPPORT, cap_law
from specrag_inference.messages import SamplingParams
from specrag_inference.sampling.processors import compute_law
from specrag_inference.verification.coupled import choose_coupled

from bench.merging.traces import (
    DrafterTrace,
    TargetTrace,
    load_target,
    name_drafter,
    save_trace,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from bench.merging.reading import PromptReader
    from bench.question_sets import ClosedQuestion

NUM_RANKS = 4
MAX_COUPLED_SUPPORT = 512
SEED = 7
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingOptions:
    """How answers are recorded.

    Attributes:
        folder: one folder a question is made in it.
        max_tokens: longest answer.
        eos_token_ids: an answer ends with one of them.
        request: appended to every question.
        ends_at: monotonic time after which nothing more is begun.
    """

    folder: Path
    max_tokens: int
    eos_token_ids: frozenset[int]
    request: str
    ends_at: float


class Recorder:
    """Target and drafter in one process, sharing nothing."""

    def __init__(
        self,
        target: PromptReader,
        drafter: PromptReader,
        build_prompt: Callable[[Sequence[PromptPassage], str], tuple[int, ...]],
        options: RecordingOptions,
    ) -> None:
        """Use these models; ``build_prompt`` makes both models' prompts."""
        self._target = target
        self._drafter = drafter
        self._build_prompt = build_prompt
        self._options = options

    def record(
        self, question: ClosedQuestion, subsets: Sequence[tuple[int, ...]], *, number: int
    ) -> bool:
        """Record what is missing of a question; false when time ran out.

        Args:
            question: with its passages.
            subsets: the passages (from 0) of each drafter.
            number: of the question; names its random key.
        """
        folder = self._options.folder / question.question_id
        random = RandomStream(random_key_from_seed(SEED + number))
        everything = tuple(range(len(question.passages)))
        target_path = folder / "target.npz"
        if not target_path.exists():
            if self._is_over():
                return False
            save_trace(target_path, self._ask_target(question, everything, random))
        target = load_target(target_path)
        for passages in subsets:
            path = folder / f"{name_drafter(passages)}.npz"
            if path.exists():
                continue
            if self._is_over():
                return False
            save_trace(path, self._ask_drafter(question, passages, target, random))
        return True

    def _is_over(self) -> bool:
        return time.monotonic() >= self._options.ends_at

    def _build(self, question: ClosedQuestion, passages: Sequence[int]) -> tuple[int, ...]:
        chosen = [
            PromptPassage(
                number=idx + 1,
                title=question.passages[idx].title,
                text=question.passages[idx].text,
            )
            for idx in passages
        ]
        return self._build_prompt(chosen, f"{question.question} {self._options.request}".strip())

    def _ask_target(
        self, question: ClosedQuestion, passages: Sequence[int], random: RandomStream
    ) -> TargetTrace:
        prompt_ids = self._build(question, passages)
        self._target.read_prompt(prompt_ids)
        greedy_ids, _ = self._decode(GREEDY, random)
        sampled_ids, laws = self._decode(SAMPLED, random)
        return TargetTrace(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            greedy_ids=np.asarray(greedy_ids, dtype=np.int32),
            sampled_ids=np.asarray(sampled_ids, dtype=np.int32),
            sampled_laws=np.stack(laws),
        )

    def _decode(
        self, sampling: SamplingParams, random: RandomStream
    ) -> tuple[list[int], list[NDArray[np.float32]]]:
        """Return an answer and the law of each of its tokens."""
        token_ids: list[int] = []
        laws: list[NDArray[np.float32]] = []
        logits = self._target.begin_answer()
        while True:
            law = compute_law(logits, sampling)
            laws.append(law)
            token_ids.append(choose_coupled(law, random, position=len(token_ids)))
            is_last = token_ids[-1] in self._options.eos_token_ids
            if is_last or len(token_ids) == self._options.max_tokens:
                return token_ids, laws
            logits = self._target.append(token_ids[-1])

    def _ask_drafter(
        self,
        question: ClosedQuestion,
        passages: Sequence[int],
        target: TargetTrace,
        random: RandomStream,
    ) -> DrafterTrace:
        prompt_ids = self._build(question, passages)
        self._drafter.read_prompt(prompt_ids)
        greedy = self._drafter.read_answer(target.greedy_ids.tolist())
        sampled = self._drafter.read_answer(target.sampled_ids.tolist())
        law_ids = np.full((len(sampled), MAX_LAW_SUPPORT), -1, dtype=np.int32)
        law_probs = np.zeros((len(sampled), MAX_LAW_SUPPORT), dtype=np.float32)
        for row, logits in enumerate(sampled):
            law = cap_law(compute_law(logits, SAMPLED))
            law_ids[row, : len(law.token_ids)] = law.token_ids
            law_probs[row, : len(law.probs)] = law.probs
        return DrafterTrace(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            greedy_choices=_rank_choices(greedy, GREEDY, random),
            coupled_choices=_rank_choices(sampled, SAMPLED, random),
            law_ids=law_ids,
            law_probs=law_probs,
        )


def _rank_choices(
    rows: NDArray[np.float32], sampling: SamplingParams, random: RandomStream
) -> NDArray[np.int32]:
    """Return [num_tokens, NUM_RANKS]: the drafter's tokens at each position, best first.

    Best by logit at temperature 0, else by log of the law plus the target's own noise.
    """
    ranked = []
    for position, logits in enumerate(rows):
        if sampling.temperature == 0.0:
            token_ids = np.sort(np.argpartition(-logits, NUM_RANKS)[:NUM_RANKS]).astype(np.int64)
            scores = logits[token_ids].astype(np.float64)
        else:
            law = cap_law(compute_law(logits, sampling), max_support=MAX_COUPLED_SUPPORT)
            token_ids = law.token_ids.astype(np.int64)
            scores = np.log(law.probs.astype(np.float64)) + random.gumbel_at(position, token_ids)
        ranked.append(token_ids[np.argsort(-scores, kind="stable")[:NUM_RANKS]])
    return np.asarray(ranked, dtype=np.int32)
