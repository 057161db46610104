"""Which drafters take part in an answer, and what to say of those that do not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from specrag.v1 import common_pb2
from specrag_common.runtime.errors import FailedPrecondition, UpstreamUnavailable
from specrag_common.speculation.proposals import DraftSource

from specrag_orchestrator.answering.events import Degradation
from specrag_orchestrator.upstream import RETRY_HINT_S

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from specrag_common.runtime.errors import SpecragError

    from specrag_orchestrator.question import DraftOptions

TOKENIZER_MISMATCH: Final = "TOKENIZER_MISMATCH"
MISSING_CAPABILITY: Final = "MISSING_CAPABILITY"

_CAPABILITY_OF: Final = {
    DraftSource.SUFFIX: common_pb2.CAPABILITY_DRAFT_SUFFIX,
    DraftSource.MODEL: common_pb2.CAPABILITY_DRAFT_TOKENS,
}


class Candidate(Protocol):
    """What the choice looks at; see :class:`~specrag_orchestrator.drafters.Drafter`."""

    @property
    def index(self) -> int:
        """Position among the configured drafters."""
        ...

    @property
    def name(self) -> str:
        """What callers see."""
        ...

    @property
    def is_usable(self) -> bool:
        """Whether it can be used right now."""
        ...

    @property
    def info(self) -> common_pb2.ModelInfo | None:
        """Its handshake."""
        ...

    @property
    def problem(self) -> str:
        """Why it cannot be used, in words."""
        ...


CandidateT = TypeVar("CandidateT", bound=Candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan(Generic[CandidateT]):
    """The drafters of one answer.

    Attributes:
        drafters: those that take part, by index; each reads the subset of its place here.
        degraded: what could not be had as asked.
    """

    drafters: tuple[CandidateT, ...]
    degraded: tuple[Degradation, ...]


def plan_drafters(
    drafters: Sequence[CandidateT], options: DraftOptions, *, fingerprint: str, num_passages: int
) -> DraftPlan[CandidateT]:
    """Choose drafters: usable, of the target's tokenizer, able to do what is asked.

    Args:
        drafters: all that are configured.
        options: what the request asks for.
        fingerprint: the target's tokenizer.
        num_passages: passages in the context; more drafters would have nothing to read.
    """
    wanted = min(options.num_drafters or len(drafters), max(1, num_passages))
    usable: list[CandidateT] = []
    left_out: list[Degradation] = []
    for drafter in drafters:
        fault = _find_fault(drafter, options, fingerprint)
        if fault is None:
            usable.append(drafter)
        else:
            left_out.append(fault)
    degraded = left_out if len(usable) < wanted else []
    if options.num_drafters is not None and wanted > len(drafters):
        detail = f"{options.num_drafters} drafters asked for, {len(drafters)} are configured"
        degraded = [*degraded, Degradation(component="drafters", reason="TOO_FEW", detail=detail)]
    return DraftPlan(drafters=tuple(usable[:wanted]), degraded=tuple(degraded))


def find_gone_drafters(
    drafters: Sequence[Candidate], *, named: Collection[str]
) -> tuple[Degradation, ...]:
    """Return those that cannot be reached at an answer's end and are not ``named`` as lost yet.

    A drafter may go while nothing is asked of it: no stream of the answer breaks then.
    """
    return tuple(
        _fault(one, "UNAVAILABLE", one.problem or "its connection was lost")
        for one in drafters
        if not one.is_usable and one.name not in named
    )


def no_drafters_error(plan: DraftPlan[CandidateT]) -> SpecragError:
    """Return the error for a request that may not do without drafters and has none."""
    reasons = {one.reason for one in plan.degraded}
    details = "; ".join(f"{one.component}: {one.detail}" for one in plan.degraded)
    message = f"no drafter can take part ({details or 'none is configured'}); set allow_fallback"
    if reasons and reasons <= {TOKENIZER_MISMATCH, MISSING_CAPABILITY}:
        return FailedPrecondition(message, reason="NO_DRAFTERS")
    return UpstreamUnavailable(message, reason="NO_DRAFTERS", retry_delay_s=RETRY_HINT_S)


def _find_fault(drafter: Candidate, options: DraftOptions, fingerprint: str) -> Degradation | None:
    """Return why a drafter cannot take part, or ``None``."""
    info = drafter.info
    if info is None or not drafter.is_usable:
        return _fault(drafter, "UNAVAILABLE", drafter.problem or "reconnecting")
    if info.tokenizer_fingerprint != fingerprint:
        return _fault(
            drafter,
            TOKENIZER_MISMATCH,
            f"its tokenizer {info.tokenizer_fingerprint[:12]} is not the target's "
            f"{fingerprint[:12]}",
        )
    needed = [_CAPABILITY_OF[source] for source in options.sources]
    missing = [one for one in needed if one not in info.capabilities]
    if missing or not set(_CAPABILITY_OF.values()).intersection(info.capabilities):
        names = [common_pb2.Capability.Name(one) for one in missing] or ["token drafting"]
        return _fault(drafter, MISSING_CAPABILITY, f"does not offer {', '.join(names)}")
    return None


def _fault(drafter: Candidate, reason: str, detail: str) -> Degradation:
    return Degradation(component=drafter.name, reason=reason, detail=detail)
