"""What a daemon knows beside the cluster's records: its workers, its files, what it did before. A value."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from headway.daemon.coordination.cluster_view import ClusterView, JobView, Place
from headway.daemon.records import PlanRecord, StagePlan, seen_key
from headway.daemon.storage.state_key import StateKey, StoredFile
from headway.daemon.supervision.worker_status import JobGeneration, WorkerStatus


@dataclass(frozen=True, slots=True)
class Spacing:
    """How far apart a worker's snapshots are: every factor-th, since the boundary that made it so."""

    factor: int = 1
    boundary: int = -1


ProvenLink = tuple[JobGeneration, int, int, str]
"""(plan, position of our worker, position of its neighbour, the neighbour's process)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node, as its agent sees it."""

    name: str
    incarnation: str
    workers: tuple[WorkerStatus, ...]
    """By device index."""
    held: Mapping[StateKey, StoredFile] = field(default_factory=dict)
    durable: Set[StateKey] = frozenset()
    """Those held files that this daemon has copied to the checkpoint folder."""
    troubles: Mapping[StateKey, str] = field(default_factory=dict)
    """Why a held file could not be copied there."""
    no_access: Set[str] = frozenset()
    """Jobs whose checkpoint folder this node has no credentials or no package for."""
    data_paths: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of a job's data to the folder of its verified token shards."""
    in_force: Mapping[str, int] = field(default_factory=dict)
    """`seen_key` of a job to the highest generation that this node saw in force: one below is from a backup of etcd."""
    spacings: Mapping[JobGeneration, Spacing] = field(default_factory=dict)
    """What was ordered by OrderSpaceSnapshots."""
    missed: Mapping[JobGeneration, tuple[int, ...]] = field(default_factory=dict)
    """The newest boundaries whose snapshots this node's workers could not write."""
    remembered: Mapping[str, int] | None = None
    """`seen_key` of a job to the highest generation that this node has written down. Nothing is done about a later
    plan: after a restart, nobody would know that its number is used. None: every one is."""
    proven: Set[ProvenLink] = frozenset()
    """The links of workers of ours whose other ends this node has dialled."""
    now: float = 0.0
    """Seconds of the clock that the view was fed with."""

    def worker_of(self, stage: StagePlan) -> WorkerStatus | None:
        """This node's worker that a plan names for a stage; None: another node's, or one of an earlier daemon."""
        is_ours = (stage.node, stage.node_incarnation) == (self.name, self.incarnation)
        return self.workers[stage.device_index] if is_ours and stage.device_index < len(self.workers) else None

    def may_obey(self, job: JobView, plan: PlanRecord) -> bool:
        """Whether a plan is not older than one that was in force, and this node will remember that it saw it."""
        known = self.remembered
        is_remembered = known is None or plan.generation <= known.get(seen_key(job.name, job.uid), 0)
        return is_remembered and not self.is_outdated(job, plan)

    def is_outdated(self, job: JobView, plan: PlanRecord | None) -> bool:
        """Whether a plan is older than one that this node saw in force."""
        return plan is not None and plan.generation < self._in_force(job)

    def is_behind(self, job: JobView) -> bool:
        """Whether all that etcd says of a job is older than what this node saw of it: nothing is thrown away then."""
        return _newest_generation(job) < self._in_force(job) or self.is_outdated(job, job.plan)

    def held_of(self, job: str) -> dict[Place, dict[str, StoredFile]]:
        """A job's files that are held here: place to layer to file."""
        found: dict[Place, dict[str, StoredFile]] = {}
        for key, file in self.held.items():
            if key.job == job:
                found.setdefault((key.timeline, key.boundary), {})[key.layer] = file
        return found

    def _in_force(self, job: JobView) -> int:
        return self.in_force.get(seen_key(job.name, job.uid), 0)


def generations_seen(view: ClusterView) -> dict[str, int]:
    """The highest generation that a view shows of each job.

    By name, so that no number is used twice under it, and by submission, so that one knows whose it was.
    """
    seen = {}
    for job in view.jobs.values():
        known = seen[job.name] = _newest_generation(job)
        if job.submission is not None:
            seen[seen_key(job.name, job.uid)] = known
    return seen


def _newest_generation(job: JobView) -> int:
    return max(job.phase.generation, *(plan.generation for plan in (job.plan, job.next) if plan is not None), 0)
