"""Accepted tokens a round of suffix drafting, replayed on recorded answers.

Usage: python -m bench.suffix_drafting --data FOLDER --answers PAIRS.json [--model REFERENCE]

``PAIRS.json`` is what ``bench.lossless --out`` wrote: answers of the target alone. Drafts of suffix
drafters depend on committed tokens only, so what would have been accepted follows from the answers
alone, exactly. Every drafter is asked in every round. Shown for each set of questions: tokens a
round (accepted and one more) and tree nodes a round, for 1, 2 and 4 drafters over the passages;
beside prompt lookup (up to three tokens matched, first occurrence, eight copied).
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.speculation.suffix_drafter import SuffixDrafter
from specrag_inference.models.loading import load_tokenizer
from specrag_inference.models.reference import BUNDLED_TARGET
from specrag_inference.prompts import ChatTokenizer, PromptBuilder

from bench.question_sets import SETS, ClosedQuestion, load_questions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

GAMMA = 8
NUMS_DRAFTERS = (1, 2, 4)
LOOKUP_TOKENS = 3
MAX_MODEL_LEN = 8192


class Source(Protocol):
    """Proposes branches behind what it was told."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take committed tokens."""

    def propose(self) -> list[tuple[int, ...]]:
        """Return branches."""


class Lookup:
    """Prompt lookup: what followed the first occurrence of the longest short suffix."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._text = list(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """See :class:`Source`."""
        self._text += token_ids

    def propose(self) -> list[tuple[int, ...]]:
        """See :class:`Source`."""
        text = self._text
        for size in range(LOOKUP_TOKENS, 0, -1):
            suffix = text[-size:]
            for begin in range(len(text) - size):
                if text[begin : begin + size] == suffix:
                    return [tuple(text[begin + size : begin + size + GAMMA])]
        return []


class Suffix:
    """The suffix drafter at one price of a node and one number of branches."""

    def __init__(
        self, token_ids: Sequence[int], *, num_branches: int, min_probability: float
    ) -> None:
        self._drafter = SuffixDrafter(token_ids)
        self._num_branches = num_branches
        self._min_probability = min_probability

    def extend(self, token_ids: Sequence[int]) -> None:
        """See :class:`Source`."""
        self._drafter.extend(token_ids)

    def propose(self) -> list[tuple[int, ...]]:
        """See :class:`Source`."""
        branches = self._drafter.propose(
            GAMMA, self._num_branches, min_probability=self._min_probability
        )
        return [branch.token_ids for branch in branches]


VARIANTS: dict[str, Callable[[Sequence[int]], Source]] = {
    "prompt lookup": Lookup,
    "chain, 0.06": partial(Suffix, num_branches=1, min_probability=0.06),
    "tree, 0.15": partial(Suffix, num_branches=4, min_probability=0.15),
    "tree, 0.06": partial(Suffix, num_branches=4, min_probability=0.06),
    "tree, 0.04": partial(Suffix, num_branches=4, min_probability=0.04),
    "tree, 0.02": partial(Suffix, num_branches=4, min_probability=0.02),
}


@dataclass(slots=True)
class Totals:
    """Sums over answers."""

    tokens: int = 0
    rounds: int = 0
    nodes: int = 0

    def __str__(self) -> str:
        """Tokens a round / nodes a round."""
        rounds = max(1, self.rounds)
        return f"{self.tokens / rounds:.2f} /{self.nodes / rounds:5.1f}"


def replay(sources: Sequence[Source], answer: Sequence[int], totals: Totals) -> None:
    """Count the rounds of one answer."""
    position = 0
    while position < len(answer):
        branches = [branch for source in sources for branch in source.propose()]
        nodes = {branch[: end + 1] for branch in branches for end in range(len(branch))}
        rest = tuple(answer[position:])
        accepted = max((len(node) for node in nodes if rest[: len(node)] == node), default=0)
        committed = rest[: accepted + 1]
        for source in sources:
            source.extend(committed)
        position += len(committed)
        totals.tokens += len(committed)
        totals.rounds += 1
        totals.nodes += len(nodes)


def build_subsets(
    builder: PromptBuilder, question: ClosedQuestion, num_drafters: int
) -> Iterable[tuple[int, ...]]:
    """Yield each drafter's prompt: passage n belongs to drafter (n - 1) modulo their number."""
    passages = [
        PromptPassage(number=number, title=passage.title, text=passage.text)
        for number, passage in enumerate(question.passages, 1)
    ]
    for index in range(num_drafters):
        subset = tuple(passages[index::num_drafters])
        if subset or not index:
            turn = ConversationTurn(passages=subset, question=question.question)
            yield builder.build(Conversation(turns=(turn,)), max_tokens=64).token_ids


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--model", default=BUNDLED_TARGET)
    parser.add_argument("--model-cache", type=Path, default=Path("~/.cache/specrag/models"))
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model, arguments.model_cache.expanduser())
    builder = PromptBuilder(ChatTokenizer.from_transformers(tokenizer), max_model_len=MAX_MODEL_LEN)
    questions = {
        question.question_id: (name, question)
        for name in SETS
        if (arguments.data / f"{name}.jsonl").exists()
        for question in load_questions(arguments.data, name, limit=1000)
    }
    table: dict[tuple[str, str, str, int], Totals] = defaultdict(Totals)
    for pair in json.loads(arguments.answers.read_text()):
        name, question = questions[pair["question_id"]]
        law = "greedy" if pair["seed"] is None else "temperature 1"
        for num_drafters in NUMS_DRAFTERS:
            subsets = list(build_subsets(builder, question, num_drafters))
            for variant, make in VARIANTS.items():
                sources = [make(subset) for subset in subsets]
                totals = table[law, name, variant, num_drafters]
                replay(sources, pair["target_only"]["token_ids"], totals)
    groups = sorted({(law, name) for law, name, _, _ in table})
    for law, name in groups:
        print(f"{name}, {law}: tokens / nodes a round by {NUMS_DRAFTERS} drafters")
        for variant in VARIANTS:
            cells = "   ".join(str(table[law, name, variant, num]) for num in NUMS_DRAFTERS)
            print(f"  {variant:14} {cells}")


if __name__ == "__main__":
    main()
