"""Forgets jobs that ended long ago, so that a cluster's records do not grow for ever. Pure.

The order of their ends counts, as etcd has seen it, and no clock: a clock that is wrong by a year must not empty the
list. A job's checkpoints and results stay where they are, as with `headway jobs rm`.
"""

from typing import Final

from headway.daemon.coordination.commands import Transaction
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import Phase
from headway.daemon.view.cluster_view import ClusterView, JobView

MOST_ENDED: Final = 200
"""Number of jobs that are remembered after their end, the last ones; and as many that have failed, which may go on."""
_CLASSES: Final = (frozenset({Phase.FINISHED, Phase.CANCELLED}), frozenset({Phase.FAILED}))


def retire_one(view: ClusterView, *, most: int = MOST_ENDED) -> Transaction | None:
    """Return the command that forgets the job that ended first; None: there are not too many."""
    for phases in _CLASSES:
        ended = [job for job in view.jobs.values() if job.phase.phase in phases and _is_done_with(view, job)]
        if len(ended) > most:
            oldest = min(ended, key=lambda job: view.revision_of(_phase(job)))
            return Transaction(
                job=oldest.name,
                reason=f"forgotten: {most} jobs have ended after it",
                compare={_phase(oldest): view.revision_of(_phase(oldest))},
                deletes=(Keys.job(oldest.name),),
            )
    return None


def _is_done_with(view: ClusterView, job: JobView) -> bool:
    """Return whether nothing about a job is left to do: no record is unreadable, no old checkpoint is to be deleted."""
    return not view.why_set_aside(job.name) and not (job.checkpoint is not None and job.checkpoint.dropped)


def _phase(job: JobView) -> str:
    return Keys.of(job.name, "phase")
