"""The state of one live sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_inference.sampling.sequence_laws import SequenceLaws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specrag_common.speculation.proposals import VerificationMode
    from specrag_common.speculation.randomness import RandomStream

    from specrag_inference.cache.block_table import BlockTable
    from specrag_inference.draft_tree import DraftTree
    from specrag_inference.ends import AnswerEnds
    from specrag_inference.messages import SamplingParams


@dataclass(slots=True, kw_only=True)
class SequenceState:
    """Tokens, cache and law of one sequence; mutated by its jobs only.

    ``table.num_tokens`` of ``token_ids`` are in the cache; the rest is *pending*. Logits of the
    last token can only come from computing it, so a sequence at rest has at least one pending
    token, unless a draft tree stands behind the last one.

    Attributes:
        sequence_id: the caller's name.
        token_ids: prompt and committed answer tokens.
        num_prompt_tokens: how many of them are the prompt.
        table: the cache blocks.
        sampling: the law; its stop ids include the model's own.
        mode: verification or drafting mode.
        random: all random numbers of the sequence.
        drafter_index: which drafter of the request this is.
        ends: watches for the end of the answer.
        draft_tree: what was drafted behind the last committed token, if it is still cached.
        distrusted_drafters: drafters that broke their own stated law in this answer.
        finished: the answer has ended.
        prefix_hashes: of the whole blocks of ``token_ids`` without the last, as they were when the
            sequence last had no cache.
        cache_generation: rises whenever everything cached is lost.
        laws: makes the laws behind ``token_ids``, which it watches: append, never replace.
    """

    sequence_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    table: BlockTable
    sampling: SamplingParams
    mode: VerificationMode
    random: RandomStream
    drafter_index: int
    ends: AnswerEnds
    draft_tree: DraftTree | None = None
    distrusted_drafters: set[int] = field(default_factory=set)
    finished: bool = False
    prefix_hashes: Sequence[bytes] = ()
    cache_generation: int = 0
    laws: SequenceLaws = field(init=False)

    def __post_init__(self) -> None:
        """Bind the laws to the tokens."""
        self.laws = SequenceLaws(
            self.sampling, self.token_ids, num_prompt_tokens=self.num_prompt_tokens
        )

    @property
    def num_answer_tokens(self) -> int:
        """Committed answer tokens: the absolute answer position of the next one."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending(self) -> int:
        """Committed tokens that are not in the cache."""
        return len(self.token_ids) - self.table.num_tokens

    def drop_scratch(self) -> None:
        """Forget the draft tree and leave at least the last token pending."""
        self.draft_tree = None
        self.table.trim(min(self.table.num_tokens, len(self.token_ids) - 1))

    def commit(self, kept_nodes: list[int], token_ids: list[int]) -> None:
        """Append committed tokens; those at ``kept_nodes`` of the tree stay in the cache.

        Args:
            kept_nodes: offsets of tree nodes behind the cached tokens, ascending.
            token_ids: the tokens, beginning with those at ``kept_nodes``.
        """
        self.table.accept(kept_nodes)
        self.token_ids += token_ids
        self.table.publish(self.token_ids)

    def forget_cache(self) -> None:
        """Give all blocks back; everything committed becomes pending again."""
        self.table.free()
        self.cache_generation += 1
        self.prefix_hashes = self.table.compute_prefix_hashes(self.token_ids[:-1])
        if self.draft_tree is not None:
            self.draft_tree.num_resident = 0
