"""Decides which ended jobs are retired, and what is left of a job whose records are deleted. Pure.

A retired job's records leave etcd: every daemon holds every record, and looks at every job. Its checkpoints stay, but
nodes delete the state that a failed job could continue from. So no clock decides about it, but the number of ended
jobs: a leader whose date is months ahead would retire every job at once.
"""

from typing import Final

from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView

MAX_RETIRED: Final = 1000
"""Maximum number of records of retired jobs; the oldest are deleted."""


def retired_record(view: ClusterView, job: JobView, *, now: float) -> RetiredRecord:
    """Return what is left of a job. now: seconds since the epoch."""
    seen = [job.phase.generation, view.retired_generation(job.name)]
    seen += [plan.generation for plan in (job.plan, job.next) if plan is not None]
    seen += [node.generations.get(job.name, 0) for node in view.nodes.values()]
    return RetiredRecord(
        phase=job.phase.phase,
        generation=max(seen),
        since=job.phase.since,
        retired_at=now,
        batch=job.progress.batch if job.progress is not None else -1,
        loss=job.progress.loss if job.progress is not None else 0.0,
        checkpoint=job.checkpoint.url if job.checkpoint is not None else "",
    )


def jobs_to_retire(view: ClusterView, *, most: int) -> list[JobView]:
    """Return the ended jobs beyond the number that is kept, the oldest first."""
    ended = sorted((job for job in view.jobs.values() if _has_ended(view, job)), key=lambda job: job.phase.since)
    return ended[: max(len(ended) - most, 0)]


def names_to_forget(view: ClusterView, *, most: int = MAX_RETIRED) -> list[str]:
    """Return the oldest retired jobs beyond the number that is kept."""
    oldest_first = sorted(view.retired, key=lambda name: view.retired[name].retired_at)
    return oldest_first[: max(len(oldest_first) - most, 0)]


def _has_ended(view: ClusterView, job: JobView) -> bool:
    """Return whether nothing about a job is under way or requested."""
    is_idle = job.plan is None and job.next is None and job.stop is None
    is_requested = job.desired.request > job.phase.request
    has_left = job.checkpoint is not None and bool(job.checkpoint.dropped)  # old checkpoints are still to be deleted
    is_over = job.submission is not None and job.phase.phase in TERMINAL_PHASES
    return is_over and is_idle and not (is_requested or has_left) and not view.why_set_aside(job.name)
