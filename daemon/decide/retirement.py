"""Decides which ended jobs are retired, what is left of them, and which jobs have vanished. Pure.

A retired job's records leave etcd: every daemon holds every record, and looks at every job. Its checkpoints stay, but
nodes delete the state that a failed job could continue from. So no clock decides about it, but the number of ended
jobs: a leader whose date is months ahead would retire every job at once.

A job vanishes when its records leave etcd though nobody removed it: keys were deleted, or an older copy restored.
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


NUM_LOOKS: Final = 4
"""Looks in a row that miss a job before it is told of: a listing of etcd's records may be under way."""


class VanishedJobs:
    """The jobs that one node has worked for, and those of them that are gone. A daemon forgets them when it ends."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._last: dict[str, JobView] = {}
        self._num_missed: dict[str, int] = {}
        self._found: dict[str, JobView] = {}

    def look(self, view: ClusterView) -> dict[str, JobView]:
        """Return the jobs that were missing at NUM_LOOKS looks in a row, as they were last seen.

        A job that was removed or retired left a record, and one that is back is not missing.
        """
        self._last = {name: job for name, job in self._last.items() if name not in view.retired}
        # Without a submission nothing but notes of nodes is left.
        there = {name: job for name, job in view.jobs.items() if job.submission is not None}
        self._last |= {name: job for name, job in there.items() if self._worked_for(view, job)}
        if view.steady_since is None:  # etcd is away, and the newest that is known of its jobs is in the view
            return self._found
        missing = self._last.keys() - there.keys()
        self._num_missed = {name: self._num_missed.get(name, 0) + 1 for name in missing}
        self._found = {name: self._last[name] for name in missing if self._num_missed[name] >= NUM_LOOKS}
        return self._found

    def _worked_for(self, view: ClusterView, job: JobView) -> bool:
        """Return whether this node has a part of the job's plan, or leads and the job has none."""
        if job.plan is not None:
            return any(stage.node == self._node for stage in job.plan.workers)
        return view.leader is not None and view.leader.node == self._node and job.phase.phase not in TERMINAL_PHASES


def vanished_text(job: JobView, url: str) -> str:
    """Return what became of a job and how it comes back. url: of its newest checkpoint, as a person may name it."""
    what = f"etcd has lost it, and nobody removed it; it was {job.phase.phase}"
    if job.checkpoint is None:
        return f"{what}, without a checkpoint: submit it again"
    return f"{what}; `headway submit --from {url}` brings it back at batch {job.checkpoint.boundary}"
