"""Handles a job about which the coordinator raises an error: that job alone fails, with the traceback. Pure."""

import traceback

from headway.daemon.coordination.commands import BrokenJob, Transaction
from headway.daemon.coordination.transactions import move
from headway.daemon.errors import in_one_line
from headway.daemon.records.records import TERMINAL_PHASES, Phase
from headway.daemon.situation.situation import JobSituation


def broken(job: str, error: Exception) -> BrokenJob:
    """Return the report of the error."""
    return BrokenJob(job=job, reason=in_one_line(error), traceback="".join(traceback.format_exception(error)))


def give_up(situation: JobSituation, found: BrokenJob, error: Exception) -> Transaction | None:
    """Return the command that fails the job; nodes keep its state.

    None sets the job aside: it has already ended, its records allow no such command, or the daemon ran out of memory,
    which is not the job's fault.

    """
    if isinstance(error, MemoryError) or situation.job.phase.phase in TERMINAL_PHASES:
        return None
    reason = f"the coordinator cannot decide about this job: {found.reason}"
    try:
        return move(
            situation,
            Phase.FAILED,
            reason,
            error=found.traceback,
            deletes=("plan", "next", "stop"),
            event=f"Failed: {reason}",
        )
    except Exception:  # the error that broke the decision also breaks the command that would fail the job
        return None
