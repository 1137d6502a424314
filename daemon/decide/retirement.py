"""Decides which ended jobs are retired, and what is left of a job whose records are deleted. Pure.

A retired job's records leave etcd: every daemon holds every record, and looks at every job. Its checkpoints stay, but
nodes delete the state that a failed job could continue from. So no clock of the day decides about it: a leader whose
date is months ahead would retire every job at once. A job's age is the time for which the leader's node has seen it
ended, by a clock that nobody sets, over all lives of its daemon.
"""

from collections.abc import Mapping
from typing import Final

from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView

DAY_S: Final = 86400.0
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


Ending = tuple[str, str, float]
"""The name and uid of a job, and the date of its end, which only tells this end from others."""


class EndingsSeen:
    """Since when this node has seen jobs ended, by the steady clock of its daemon."""

    def __init__(self, earlier: Mapping[str, float] | None = None) -> None:
        """earlier: for how many seconds daemons before this one have seen them, as `ages` told."""
        self._since: dict[Ending, float] = {}
        self._earlier = dict(earlier or {})

    def look(self, view: ClusterView, *, now: float) -> Mapping[str, float]:
        """Return for how many seconds each ended job has been one. now: seconds of a monotonic clock."""
        ended = {_ending_of(job): job.name for job in view.jobs.values() if _has_ended(view, job)}
        self._since = {ending: self._since.get(ending, now - self._earlier.get(_text(ending), 0.0)) for ending in ended}
        return {name: now - self._since[ending] for ending, name in ended.items()}

    def ages(self, *, now: float) -> Mapping[str, float]:
        """Return for how many seconds each end has been seen, for a later daemon."""
        return {_text(ending): now - since for ending, since in self._since.items()}


def jobs_to_retire(
    view: ClusterView, *, ended_for_s: Mapping[str, float], most: int, kept_days: float
) -> list[JobView]:
    """Return the ended jobs that are beyond the number or the age that is kept, the oldest first.

    ended_for_s: age of each job that has ended. most: number of ended jobs that are kept. kept_days: their age; 0: any.
    """
    ended = sorted((job for job in view.jobs.values() if _has_ended(view, job)), key=lambda job: job.phase.since)
    num_beyond = max(len(ended) - most, 0)
    is_old = [bool(kept_days) and ended_for_s.get(job.name, 0.0) > kept_days * DAY_S for job in ended]
    return [job for rank, job in enumerate(ended) if rank < num_beyond or is_old[rank]]


def names_to_forget(view: ClusterView, *, most: int = MAX_RETIRED) -> list[str]:
    """Return the oldest retired jobs beyond the number that is kept."""
    oldest_first = sorted(view.retired, key=lambda name: view.retired[name].retired_at)
    return oldest_first[: max(len(oldest_first) - most, 0)]


def _ending_of(job: JobView) -> Ending:
    return job.name, job.submission.uid if job.submission is not None else "", job.phase.since


def _text(ending: Ending) -> str:
    name, uid, since = ending
    return f"{name}/{uid}/{since!r}"


def _has_ended(view: ClusterView, job: JobView) -> bool:
    """Return whether nothing about a job is under way or requested."""
    is_idle = job.plan is None and job.next is None and job.stop is None
    is_requested = job.desired.request > job.phase.request
    has_left = job.checkpoint is not None and bool(job.checkpoint.dropped)  # old checkpoints are still to be deleted
    is_over = job.submission is not None and job.phase.phase in TERMINAL_PHASES
    return is_over and is_idle and not (is_requested or has_left) and not view.why_set_aside(job.name)
