"""What a session remembers of its drafters, so that a later turn drafts well from its start.

Only shares of accepted tokens are kept: what things cost depends on the moment.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from specrag_common.runtime.logs import get_logger
from specrag_common.speculation.acceptance import AcceptanceHistory
from specrag_common.speculation.joint_history import JointHistory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specrag_common.sessions.model import Session

_JOINT: Final = "*"
"""Key of what is known of the drafters together; no address reads so."""

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftMemory:
    """State of the draft controller between two turns.

    Attributes:
        histories: each drafter's acceptance, by its address.
        joint: what is known of the drafters together.
    """

    histories: Mapping[str, AcceptanceHistory] = field(default_factory=dict)
    joint: JointHistory = field(default_factory=JointHistory)

    def to_log(self) -> dict[str, dict[str, float]]:
        """Return the memory as the turn log keeps it."""
        states = {address: history.to_dict() for address, history in self.histories.items()}
        return {**states, _JOINT: self.joint.to_dict()} if states else {}


def recall(session: Session | None) -> DraftMemory:
    """Return what the session's last turn left; what cannot be read is forgotten."""
    outcome = session.turns[-1].outcome if session is not None and session.turns else None
    histories: dict[str, AcceptanceHistory] = {}
    joint = JointHistory()
    for name, state in (outcome.draft_lengths if outcome is not None else {}).items():
        try:
            if name == _JOINT:
                joint = JointHistory.from_dict(state)
            else:
                histories[name] = AcceptanceHistory.from_dict(state)
        except ValueError as exc:
            _log.warning("draft history not readable", drafter=name, error=str(exc))
    return DraftMemory(histories=histories, joint=joint)
