"""Drawing one draft token, and the law that travels with it.

Invariant kept: a SAMPLED token is drawn from exactly the float32 numbers that are shipped (capped
and renormalised first), with a uniform no other draw uses. The drafter's law may be anything;
processing it like the target's raises acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from specrag_common.speculation.proposals import DraftLaw, VerificationMode
from specrag_common.speculation.randomness import Purpose, RandomStream

from specrag_inference.sampling.drawing import draw
from specrag_inference.sampling.truncation import select_top

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from specrag_inference.sampling.history import TokenHistory
    from specrag_inference.sampling.processors import LawChain

MAX_LAW_SUPPORT = 64
"""Most tokens of a shipped law: the drafter caps its own law and draws from the cap."""

_MAX_COUPLED_SUPPORT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnToken:
    """A draft token.

    Attributes:
        token_id: the token.
        law: what it was drawn from; ``None`` = DETERMINISTIC, or COUPLED mode.
    """

    token_id: int
    law: DraftLaw | None


def draw_draft_token(
    logits: NDArray[np.floating[Any]],
    chain: LawChain,
    *,
    history: TokenHistory,
    mode: VerificationMode,
    random: RandomStream,
    drafter_index: int,
    branch_idx: int,
    rank: int = 0,
) -> DrawnToken:
    """Return the next token of a draft branch.

    Args:
        logits: [vocab_size] of the draft model, padding ids cut off.
        chain: makes the draft law; the target's own settings raise acceptance.
        history: the tokens before; its path are those of the branch. Two rounds may draw for one
            position, and the verifier may have looked at what the first one drew: the length of the
            path tells them apart.
        mode: REJECTION draws from the law; COUPLED couples to the target's choice.
        random: the sequence's random numbers, the same key as the verifier's in COUPLED mode.
        drafter_index: the drafter, as numbered in the request.
        branch_idx: draw order of the branch. In REJECTION mode branches are independent.
        rank: which best token to take where the choice is not random (temperature 0 or COUPLED);
            0 is the best. Further siblings take further ranks.

    Raises:
        NumericsError: a logit is NaN or infinite, or every token is ruled out.
        ValueError: ``rank`` is not below the vocabulary's size.
    """
    if not 0 <= rank < len(logits):
        raise ValueError(f"rank={rank} is outside [0, {len(logits)})")
    adjusted = chain.adjust(logits, history)
    position = history.num_answer_tokens
    if chain.is_greedy:
        return DrawnToken(token_id=_choose_rank(adjusted, rank), law=None)
    law = chain.compute_law_of(adjusted)
    if mode is VerificationMode.COUPLED:
        return DrawnToken(
            token_id=_choose_coupled_rank(law, adjusted, random, position, rank), law=None
        )
    draft_law = cap_law(law)
    uniform = random.uniform(
        Purpose.DRAFT,
        position=position,
        drafter_index=drafter_index,
        branch_idx=branch_idx,
        trial=len(history.path),
    )
    token_id = int(draft_law.token_ids[draw(draft_law.probs, uniform)])
    return DrawnToken(token_id=token_id, law=draft_law)


def cap_law(law: NDArray[np.floating[Any]], *, max_support: int = MAX_LAW_SUPPORT) -> DraftLaw:
    """Return the law restricted to its most likely tokens and renormalised, dtype kept.

    Args:
        law: [vocab_size], sums to 1.
        max_support: most tokens kept; the lowest ids on ties.
    """
    token_ids = _select_support(law, max_support)
    probs = law[token_ids]
    total = float(probs.sum(dtype=np.float64))
    return DraftLaw(token_ids=token_ids.astype(np.int32), probs=probs / probs.dtype.type(total))


def _choose_coupled_rank(
    law: NDArray[np.floating[Any]],
    logits: NDArray[np.floating[Any]],
    random: RandomStream,
    position: int,
    rank: int,
) -> int:
    """Return the token of ``rank`` by log law + G; behind the law's support, by logit."""
    support = _select_support(law, _MAX_COUPLED_SUPPORT)
    if rank >= len(support):
        rest = np.setdiff1d(np.arange(len(logits)), support)
        return int(rest[_choose_rank(logits[rest], rank - len(support))])
    if len(support) == 1:
        return int(support[0])
    if rank == 0:
        return int(support[random.gumbel_argmax(position, support, law[support])])
    scores = np.log(law[support].astype(np.float64)) + random.gumbel_at(position, support)
    return int(support[_choose_rank(scores, rank)])


def _select_support(law: NDArray[np.floating[Any]], max_support: int) -> NDArray[np.intp]:
    """Return the most likely tokens with a positive probability, ascending."""
    is_positive = law > 0
    if np.count_nonzero(is_positive) <= max_support:
        return np.flatnonzero(is_positive)
    return select_top(law, max_support)


def _choose_rank(values: NDArray[np.floating[Any]], rank: int) -> int:
    """Return the index of the value of ``rank`` from the largest; the lowest index on ties."""
    if rank == 0:
        return int(np.argmax(values))
    top = select_top(values, rank + 1)
    return int(top[np.argsort(-values[top], kind="stable")[rank]])
