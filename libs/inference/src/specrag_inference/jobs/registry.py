"""Which job carries out which command."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from specrag_inference.jobs.propose import ProposeJob
from specrag_inference.jobs.score import ScoreJob
from specrag_inference.jobs.verify import VerifyJob
from specrag_inference.messages import ProposeTokens, ScoreTree, VerifyTree

if TYPE_CHECKING:
    from specrag_inference.jobs.job import Job, JobLimits
    from specrag_inference.messages import JobCommand
    from specrag_inference.sequence import SequenceState


def build_job(sequence: SequenceState, command: JobCommand, limits: JobLimits) -> Job:
    """Return the job of a command to an open sequence."""
    match command:
        case VerifyTree():
            return VerifyJob(sequence, command, limits)
        case ProposeTokens():
            return ProposeJob(sequence, command, limits)
        case ScoreTree():
            return ScoreJob(sequence, command, limits)
        case _:
            assert_never(command)
