"""What the round machine tells its driver to do, and what rounds may cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.controller import DEFAULT_MAX_BRANCHES, DEFAULT_MAX_GAMMA

from specrag_orchestrator.answering.waiting import WaitBounds

if TYPE_CHECKING:
    from specrag_common.speculation.token_tree import TokenTree
    from specrag_common.wire.rounds import RoundKey


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundLimits:
    """What rounds may cost.

    Attributes:
        max_tokens: most answer tokens.
        max_gamma: most tokens a branch.
        max_branches: most branches a drafter and source.
        max_draft_tokens: proposed tokens a round, before merging.
        waits: how long to wait for proposals.
    """

    max_tokens: int
    max_gamma: int = DEFAULT_MAX_GAMMA
    max_branches: int = DEFAULT_MAX_BRANCHES
    max_draft_tokens: int = 64
    waits: WaitBounds = field(default_factory=WaitBounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCall:
    """Tell a drafter what was committed and ask it for a proposal.

    Attributes:
        key: the round.
        committed_token_ids: what it has not been told yet.
        gamma: most tokens a branch.
        num_branches: most branches a source.
        min_probability: what a suffix draft's token must be reached with.
    """

    key: RoundKey
    committed_token_ids: tuple[int, ...]
    gamma: int
    num_branches: int
    min_probability: float

    @property
    def drafter_index(self) -> int:
        """Whom to ask."""
        return self.key.drafter_index


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyCall:
    """Have the target verify a tree, then decode ``free_run_tokens`` alone."""

    key: RoundKey
    tree: TokenTree
    free_run_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStep:
    """What the driver is to do now.

    Attributes:
        draft_calls: rounds to send to drafters.
        verify_call: round to send to the target.
        speculation: tokens to show behind the committed ones; ``None``: leave what is shown.
        verified_tree: the tree that was just decided; ``None`` for tokens decoded alone.
    """

    draft_calls: tuple[DraftCall, ...] = ()
    verify_call: VerifyCall | None = None
    speculation: tuple[int, ...] | None = None
    verified_tree: TokenTree | None = None
