"""What a drafter proposes in one round, and the law each proposed token was drawn from.

Vocabulary: a *branch* is one drawn continuation of the committed tokens; its index is its draw
order. A *proposal* is all branches of one drafter in one round. In COUPLED mode no law travels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]
"""[num_tokens] int32."""


class VerificationMode(StrEnum):
    """How the target decides; echoed to the caller."""

    REJECTION = "rejection"
    COUPLED = "coupled"


class SiblingKind(StrEnum):
    """How the branches of one proposal that share a prefix were drawn."""

    IID = "iid"
    WITHOUT_REPLACEMENT = "without_replacement"


class DraftSource(StrEnum):
    """Where a branch comes from."""

    SUFFIX = "suffix"
    MODEL = "model"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLaw:
    """The distribution a token was really drawn from (kind SAMPLED on the wire).

    Attributes:
        token_ids: [support_size] int32, distinct, ascending.
        probs: [support_size] float32, positive, summing to 1. The very numbers drawn from.
    """

    token_ids: TokenIds
    probs: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBranch:
    """One chain of proposed tokens.

    Attributes:
        token_ids: the tokens, nearest to the committed text first; at least one.
        laws: one entry a token. ``None`` means DETERMINISTIC (one-hot); always ``None`` in COUPLED
            mode, where no law is needed.
        source: which backend proposed it.
    """

    token_ids: tuple[int, ...]
    laws: tuple[DraftLaw | None, ...]
    source: DraftSource

    def __post_init__(self) -> None:
        """Raise ``ValueError`` when a token lacks its law entry or the branch is empty."""
        if not self.token_ids or len(self.token_ids) != len(self.laws):
            raise ValueError(
                f"a branch needs one law entry a token: num_tokens={len(self.token_ids)} "
                f"num_laws={len(self.laws)}"
            )

    def cut(self, num_tokens: int) -> DraftBranch:
        """Return the first ``num_tokens`` tokens as a branch (``num_tokens`` >= 1)."""
        return DraftBranch(
            token_ids=self.token_ids[:num_tokens],
            laws=self.laws[:num_tokens],
            source=self.source,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftProposal:
    """All branches of one drafter for one round.

    Attributes:
        drafter_index: position of the drafter in the request, from 0.
        committed_length: number of committed answer tokens the branches continue.
        branches: in draw order; equal branches stay separate.
        sibling_kind: how branches with a common prefix were drawn.
        gamma: tokens a branch that were asked for. A budget is shared out by it and not by the
            branches' lengths, which may depend on drawn tokens. ``None``: the longest branch
            counts, right only where no length depends on a sampled token.
    """

    drafter_index: int
    committed_length: int
    branches: tuple[DraftBranch, ...]
    sibling_kind: SiblingKind = SiblingKind.IID
    gamma: int | None = None
