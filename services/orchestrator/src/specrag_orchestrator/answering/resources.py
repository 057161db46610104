"""What every answer of this process shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specrag_common.speculation.controller import DEFAULT_MAX_GAMMA
from specrag_common.speculation.step_costs import StepCosts

from specrag_orchestrator.answering.waiting import DrafterPace, WaitBounds

if TYPE_CHECKING:
    from collections.abc import Callable

    from specrag.v1 import verifier_pb2_grpc
    from specrag_common.sessions.lease import SessionLeases
    from specrag_common.sessions.turn_log import TurnLog

    from specrag_orchestrator.drafters import DrafterPool
    from specrag_orchestrator.retrieval import PassageSearch
    from specrag_orchestrator.target_model import TargetModels


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStore:
    """Sessions: their turns, and the leases that order their writers."""

    turn_log: TurnLog
    leases: SessionLeases


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTuning:
    """How drafting is tuned.

    Attributes:
        max_gamma: most tokens a branch when the request does not say.
        max_draft_tokens: proposed tokens a round, before merging.
        waits: how long a round waits for proposals.
        connect_s: longest a request waits to learn whether a drafter is usable.
    """

    max_gamma: int = DEFAULT_MAX_GAMMA
    max_draft_tokens: int = 64
    waits: WaitBounds = field(default_factory=WaitBounds)
    connect_s: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Connections and settings of the process; owned by the composition root.

    Attributes:
        search: the retriever.
        verifier: the verifier's stub.
        target_models: what the verifier serves.
        drafters: the drafters.
        sessions: ``None`` when no store is configured.
        tuning: of drafting.
        clock: monotonic seconds.
        step_costs: what the target's rounds cost, learned from all answers.
        paces: how fast each drafter answers, by address, learned from all answers.
    """

    search: PassageSearch
    verifier: verifier_pb2_grpc.VerifierServiceAsyncStub
    target_models: TargetModels
    drafters: DrafterPool
    sessions: SessionStore | None
    tuning: DraftTuning
    clock: Callable[[], float]
    step_costs: StepCosts = field(default_factory=StepCosts)
    paces: dict[str, DrafterPace] = field(default_factory=dict)
