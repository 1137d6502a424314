"""The order in which jobs wait for devices, and in which all jobs are decided on. Pure."""

from collections.abc import Iterable

from headway.daemon.cluster.records import Desired, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.usage import EQUAL_WITHIN, per_share


def in_queue_order(jobs: Iterable[JobView], view: ClusterView, *, now: float) -> list[JobView]:
    """Return the jobs in order, the next one first. now: by the clock that the view was fed with."""
    used, equal_s = view.usage.read_out(now), max(view.shares.slice_s * EQUAL_WITHIN, 1e-9)

    def key(job: JobView) -> tuple[int, int, int]:
        return -job.priority, int(per_share(used, job.user, view.shares) // equal_s), job.spec_revision

    return sorted(jobs, key=key)


def in_turn(view: ClusterView, *, now: float) -> list[JobView]:
    """Return all jobs in the order of decisions: those that recover, those that wait, then the others, first
    in first.
    """
    jobs = view.jobs_in_order()
    recovering = [job for job in jobs if job.phase.phase is Phase.RECOVERING]
    waiting = in_queue_order((job for job in jobs if job.phase.phase is Phase.QUEUED), view, now=now)
    others = [job for job in jobs if job.phase.phase not in (Phase.RECOVERING, Phase.QUEUED)]
    return [*recovering, *waiting, *others]


def queue(view: ClusterView, *, now: float) -> list[JobView]:
    """Return the jobs that wait for devices, the next one first."""
    waiting = (job for job in view.jobs.values() if job.submission is not None and is_queued(job))
    return in_queue_order(waiting, view, now=now)


def is_queued(job: JobView) -> bool:
    """Return whether the job wants to start and has not."""
    return job.phase.phase is Phase.QUEUED and job.desired.state is Desired.RUNNING
