"""What a daemon knows beyond the cluster's records: its workers, its files, its earlier work. A value."""

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field

from headway.daemon.cluster.records import PlanRecord, StopRecord, WorkerPart, seen_key
from headway.daemon.cluster.state_key import JOURNAL, StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView, Place
from headway.daemon.jobs.job import PluginsSpec
from headway.daemon.worker.goal import JobGeneration, WorkerStatus

ProvenLink = tuple[JobGeneration, int, int, str]
"""(plan, position of our worker, position of its neighbour, the neighbour's process)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeState:
    """One node as its agent sees it."""

    name: str
    incarnation: str
    workers: tuple[WorkerStatus, ...]
    """Worker statuses by device index."""
    held: Mapping[StateKey, StoredFile] = field(default_factory=dict)
    durable: Set[StateKey] = frozenset()
    """Held files that this daemon has copied to the checkpoint folder."""
    troubles: Mapping[StateKey, str] = field(default_factory=dict)
    """Reasons why held files could not be copied to the checkpoint folder."""
    no_access: Set[str] = frozenset()
    """Jobs for whose checkpoint folder this node has no credentials or no package."""
    data_paths: Mapping[str, str] = field(default_factory=dict)
    """Folder of verified token shards, by the SHA-256 of a data source."""
    data_state: Callable[[str], str] = lambda _: ""
    """Returns the state of such a folder when it was verified."""
    state_dir: Callable[[str, int], str] = lambda job, timeline: f"/s/{job}/{timeline}"
    """Returns the folder for the files of a job's timeline."""
    log_path: Callable[[str], str] = lambda job: f"/logs/{job}.log"
    """Returns the file for the output of a job's workers."""
    in_force: Mapping[str, int] = field(default_factory=dict)
    """Highest generation seen in force, by `seen_key` of the job. A lower one comes from a backup of etcd."""
    missed: Mapping[JobGeneration, tuple[int, ...]] = field(default_factory=dict)
    """Newest boundaries of which this node's workers could not write snapshots."""
    remembered: Mapping[str, int] | None = None
    """Highest generation that this node has persisted, by `seen_key` of the job. Later plans are ignored: after a
    restart,
    no record would show that their number is used. None: every generation is persisted.

    """
    allow_plugins: tuple[str, ...] = ()
    """Wheels whose code its workers may import, by its own settings."""
    proven: Set[ProvenLink] = frozenset()
    """Links of our workers whose other end answered this node."""
    now: float = 0.0
    """The present, in seconds of the clock that the view was fed with."""

    def worker_of(self, stage: WorkerPart) -> WorkerStatus | None:
        """Return this node's worker for a stage of a plan; None: it belongs to another node or to an earlier daemon."""
        is_ours = (stage.node, stage.node_incarnation) == (self.name, self.incarnation)
        return self.workers[stage.device_index] if is_ours and stage.device_index < len(self.workers) else None

    def may_obey(self, job: JobView, plan: PlanRecord) -> bool:
        """Return whether no later plan was in force, and this node has persisted that it saw the plan."""
        known = self.remembered
        is_remembered = known is None or plan.generation <= known.get(seen_key(job.name, job.uid), 0)
        return is_remembered and not self.is_outdated(job, plan)

    def is_outdated(self, job: JobView, plan: PlanRecord | None) -> bool:
        """Return whether a plan is older than one that this node saw in force."""
        return plan is not None and plan.generation < self._in_force(job)

    def is_behind(self, job: JobView) -> bool:
        """Return whether etcd's record of a job is older than this node's knowledge. Then nothing is deleted."""
        return _newest_generation(job) < self._in_force(job) or self.is_outdated(job, job.plan)

    def held_of(self, job: str) -> dict[Place, dict[str, StoredFile]]:
        """Return the job's files that this node holds: place to layer to file."""
        found: dict[Place, dict[str, StoredFile]] = {}
        for key, file in self.held.items():
            if key.job == job:
                found.setdefault((key.timeline, key.boundary), {})[key.layer] = file
        return found

    def _in_force(self, job: JobView) -> int:
        return self.in_force.get(seen_key(job.name, job.uid), 0)


def generations_seen(view: ClusterView) -> dict[str, int]:
    """Return the highest generation of each job in a view.

    It is kept by name, so that no number is used twice, and by submission, so that its owner is known.

    """
    seen = {}
    for job in view.jobs.values():
        known = seen[job.name] = _newest_generation(job)
        if job.submission is not None:
            seen[seen_key(job.name, job.uid)] = known
    return seen


def generations_ahead(remembered: Mapping[str, int], view: ClusterView) -> dict[str, int]:
    """Return the remembered generations above those of etcd's own records: its history went back, or a key was deleted.

    The others change no decision, and would be written anew by every node at every plan. If one key of a name is above,
    all keys of the name are returned: without its submissions, a name would count for each of them.
    """
    ahead = set()
    for key, generation in remembered.items():
        name, _, uid = key.partition("/")
        job = view.jobs.get(name)
        told = job.phase.generation if job is not None else 0
        is_present = job is not None and bool(uid) and uid == job.uid
        if generation > (told if is_present else max(told, view.retired_generation(name))):
            ahead.add(name)
    return {key: generation for key, generation in remembered.items() if key.partition("/")[0] in ahead}


def _newest_generation(job: JobView) -> int:
    return max(job.phase.generation, *(plan.generation for plan in (job.plan, job.next) if plan is not None), 0)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker of this node, and its part of a plan."""

    job: JobView
    plan: PlanRecord
    position: int
    worker: WorkerStatus

    @property
    def stage(self) -> WorkerPart:
        return self.plan.workers[self.position]

    @property
    def run_key(self) -> JobGeneration:
        return JobGeneration(self.job.name, self.plan.generation)

    @property
    def data_names(self) -> tuple[str, ...]:
        """Return the SHA-256 of each data source that it reads: those of the job, on the first stage."""
        assert self.job.spec is not None, "only jobs with a spec have posts"
        is_first = self.position in self.plan.replicas[0]
        return tuple(part.sha256 for part in self.job.spec.data.parts) if is_first else ()

    @property
    def plugins(self) -> PluginsSpec:
        """Return the wheel with the job's own code."""
        assert self.job.spec is not None, "only jobs with a spec have posts"
        return self.job.spec.plugins

    @property
    def parts(self) -> tuple[str, ...]:
        """Return its layers and, for the lead of the last stage, the journal."""
        layers = self.stage.layers
        return (*layers, JOURNAL) if self.plan.has_journal(self.position) else layers

    @property
    def stop(self) -> StopRecord | None:
        """Return the wanted end of this generation."""
        stop = self.job.stop
        return stop if stop is not None and stop.generation == self.plan.generation else None


def assignments_of(job: JobView, plan: PlanRecord | None, node: NodeState) -> Iterator[Assignment]:
    """Yield all places on this node in a plan, if the node obeys the plan."""
    if plan is None or not node.may_obey(job, plan):
        return
    for position, stage in enumerate(plan.workers):
        worker = node.worker_of(stage)
        if worker is not None:
            yield Assignment(job, plan, position, worker)


def is_over(view: ClusterView, run_key: JobGeneration) -> bool:
    """Return whether no record names a generation any more, so that its failures can be forgotten."""
    job = view.jobs.get(run_key.job)
    return job is None or all(plan is None or plan.generation != run_key.generation for plan in (job.plan, job.next))
