"""Rounds in REJECTION mode at temperature 1, drawn given the answer they commit.

A round's outcome is a token law's draw together with which trial gave it. Given the token y that is
committed at a node, trial j gave it with probability proportional to

    reach_j * min(residual_j(y), draft_probs_j(y)),   reach_{j+1} = reach_j * P(trial j rejected)

and the final draw with reach * residual(y); these sum to target_probs(y). Trials before j did not
propose y (a rejected y leaves no residual), those behind j proposed it with their own probability,
independently, and descend too. Walking down the recorded answer with these draws gives accepted
lengths of exactly the law that the sequential rule has over all answers.

Source: the rule is that of :mod:`specrag_inference.verification.rejection`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.merging.coupled_rounds import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from bench.merging.coupled_rounds import Drafter
    from bench.merging.traces import DrafterTrace, TargetTrace


class NodeLaws:
    """Laws at one position of the answer over the few tokens that anybody proposes.

    All other tokens are one entry: they are never proposed, so a residual only scales them.
    """

    def __init__(
        self,
        target_law: NDArray[np.float32],
        draft_laws: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]],
        copied_ids: Sequence[int],
        answer_id: int,
    ) -> None:
        """Gather what can be proposed.

        Args:
            target_law: [vocab_size], sums to 1.
            draft_laws: (ids, probs) of each draft model, -1 padded.
            copied_ids: tokens that deterministic sources may propose here.
            answer_id: what is committed.
        """
        known = np.unique(
            np.concatenate([*(ids for ids, _ in draft_laws), copied_ids, [answer_id]])
        )
        self._ids = known[known >= 0].astype(np.int64)
        probs = target_law[self._ids].astype(np.float64)
        rest = max(1.0 - float(probs.sum()), 0.0)
        self.target = np.append(probs, rest)
        self.target /= self.target.sum()
        self.drafts = [self._spread(ids, probs) for ids, probs in draft_laws]
        self.answer_idx = self.find(answer_id)

    def find(self, token_id: int) -> int:
        """Return the index of a known token."""
        return int(np.searchsorted(self._ids, token_id))

    def one_hot(self, token_id: int) -> NDArray[np.float64]:
        """Return the law of a deterministic proposal."""
        law = np.zeros_like(self.target)
        law[self.find(token_id)] = 1.0
        return law

    def _spread(self, ids: NDArray[np.int32], probs: NDArray[np.float32]) -> NDArray[np.float64]:
        law = np.zeros_like(self.target)
        kept = ids >= 0
        law[np.searchsorted(self._ids, ids[kept])] = probs[kept]
        law /= law.sum()
        return law


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOutcome:
    """What happens at a node, given the token committed there.

    Attributes:
        accepted: the trial that gave the token; ``None``: the final draw did.
        descending: trials whose own branch goes on with the token, in order; the accepted one
            first.
    """

    accepted: int | None
    descending: tuple[int, ...]


def compute_weights(
    target: NDArray[np.float64], laws: Sequence[NDArray[np.float64]], answer_idx: int
) -> NDArray[np.float64]:
    """Return the probability that each trial, and last the final draw, gives a token.

    Args:
        target: the target's law at the node.
        laws: what each trial's token is drawn from, in the order tried.
        answer_idx: the token.

    Returns:
        [num_trials + 1], sums to ``target[answer_idx]``.
    """
    weights, residual, reach = [], target, 1.0
    for law in laws:
        taken = np.minimum(residual, law)
        weights.append(reach * float(taken[answer_idx]))
        left = residual - taken
        total = float(left.sum())
        reach *= total
        residual = left / total if total > 0 else residual
    return np.asarray([*weights, reach * float(residual[answer_idx])])


def draw_outcome(
    target: NDArray[np.float64],
    trials: Sequence[tuple[int, NDArray[np.float64]]],
    answer_idx: int,
    rng: np.random.Generator,
) -> NodeOutcome:
    """Draw which trial gave the committed token, and which later ones proposed it as well.

    Args:
        target: the target's law at the node.
        trials: (name, law drawn from) in the order tried; a one-hot law is deterministic.
        answer_idx: the committed token.
        rng: source of the draws.
    """
    cumulative = np.cumsum(compute_weights(target, [law for _, law in trials], answer_idx))
    chosen = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
    if chosen >= len(trials):
        return NodeOutcome(accepted=None, descending=())
    later = [name for name, law in trials[chosen + 1 :] if rng.random() < float(law[answer_idx])]
    return NodeOutcome(accepted=trials[chosen][0], descending=(trials[chosen][0], *later))


def replay_rejection(
    target: TargetTrace,
    drafters: Sequence[DrafterTrace],
    copiers: Sequence[Drafter],
    *,
    gamma: int,
    rng: np.random.Generator,
) -> Tally:
    """Return what the rounds of the sampled answer do, one draw of them.

    Args:
        target: the answer and its laws.
        drafters: one sampled branch each.
        copiers: deterministic sources, tried behind the sampled ones.
        gamma: most tokens a branch.
        rng: source of the draws.
    """
    answer_ids = target.sampled_ids.tolist()
    tally, position = Tally(), 0
    while position < len(answer_ids):
        copies = [
            branch for copier in copiers for branch in copier.propose(position, gamma) if branch
        ]
        num_accepted = _walk(target, drafters, copies, position, gamma=gamma, rng=rng)
        num_left = len(answer_ids) - position
        num_tokens = min(num_accepted + 1, num_left)
        num_nodes = len(drafters) * gamma + sum(map(len, copies))
        tally += Tally.of_round(num_tokens, num_nodes, is_uncut=num_left > gamma)
        position += num_tokens
    return tally


def _walk(
    target: TargetTrace,
    drafters: Sequence[DrafterTrace],
    copies: Sequence[tuple[int, ...]],
    position: int,
    *,
    gamma: int,
    rng: np.random.Generator,
) -> int:
    """Return the accepted tokens of one round. Names below ``len(drafters)`` are draft models."""
    live = list(range(len(drafters) + len(copies)))
    answer_ids = target.sampled_ids
    for depth in range(min(gamma, len(answer_ids) - position)):
        row = position + depth
        going = {
            name: copies[name - len(drafters)][depth]
            for name in live
            if name >= len(drafters) and len(copies[name - len(drafters)]) > depth
        }
        models = sorted(name for name in live if name < len(drafters))
        laws = NodeLaws(
            target.sampled_laws[row],
            [(drafters[name].law_ids[row], drafters[name].law_probs[row]) for name in models],
            list(going.values()),
            int(answer_ids[row]),
        )
        trials = [*zip(models, laws.drafts, strict=True)]
        trials += [(name, laws.one_hot(token_id)) for name, token_id in sorted(going.items())]
        outcome = draw_outcome(laws.target, trials, laws.answer_idx, rng)
        if outcome.accepted is None:
            return depth
        live = list(outcome.descending)
    return min(gamma, len(answer_ids) - position)
