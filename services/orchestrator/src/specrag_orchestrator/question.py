"""A question as the orchestrator understands it: every field checked, every default filled in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from specrag_common.wire.sampling import SamplingOptions

if TYPE_CHECKING:
    from specrag.v1 import retriever_pb2
    from specrag_common.speculation.proposals import DraftSource, VerificationMode

    from specrag_orchestrator.passages import SourcePassage


class AnswerPolicy(StrEnum):
    """How an answer comes about."""

    TARGET_ONLY = "target_only"
    JOINT = "joint"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOptions:
    """How drafters are used.

    Attributes:
        num_drafters: how many; ``None``: all that are healthy, at most one a passage.
        max_gamma: most tokens a branch; ``None``: the length controller's own limit.
        num_branches: most branches a drafter and source; ``None``: the controller's own limit.
        sources: where branches come from; empty: the drafters' default.
    """

    num_drafters: int | None = None
    max_gamma: int | None = None
    num_branches: int | None = None
    sources: tuple[DraftSource, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to answer.

    Attributes:
        text: the question, not blank.
        collection: where to search; empty when ``given_passages`` are read instead.
        tenant: whose documents.
        session_id: conversation to continue or begin; empty: none.
        request_id: the client's idempotency key; may be empty.
        policy: how to answer.
        sampling: the output law and the ends.
        seed: makes the answer reproducible; ``None``: a fresh random key.
        mode: how the target verifies.
        num_passages: how many to retrieve; ``None``: the service's default.
        filters: conditions on metadata, checked by the retriever.
        draft: how drafters are used.
        include_speculative: also tell what may be taken back.
        allow_fallback: answer without drafters when none is left.
        given_passages: passages to read instead of searching, unnumbered; empty: search.
    """

    text: str
    collection: str = ""
    tenant: str = "default"
    session_id: str = ""
    request_id: str = ""
    policy: AnswerPolicy
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    seed: int | None = None
    mode: VerificationMode
    num_passages: int | None = None
    filters: tuple[retriever_pb2.FilterCondition, ...] = ()
    draft: DraftOptions = field(default_factory=DraftOptions)
    include_speculative: bool = False
    allow_fallback: bool = True
    given_passages: tuple[SourcePassage, ...] = ()
