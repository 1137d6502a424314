"""Notices jobs whose records leave etcd though nobody removed them: keys were deleted, or an older copy restored. Pure.

A daemon forgets what it has noticed when it ends.
"""

from typing import Final

from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView

NUM_LOOKS: Final = 4
"""Looks in a row that miss a job before it is told of: a listing of etcd's records may be under way."""


class VanishedJobs:
    """The jobs that one node has worked for, and those of them that are gone."""

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
