"""What etcd says, folded into one value: the nodes, the leader, and every job with its records.

Pure. Keys may come in any order, twice, or late: a key's older revision never replaces a newer one. Keys that nobody
knows and values that cannot be read are collected in `ignored` with the reason, and change nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from headway.daemon.coordination.settling import Unrest
from headway.daemon.coordination.usage import UsageMeter
from headway.daemon.jobs.admission import admitted
from headway.daemon.jobs.job import JobSpec
from headway.daemon.measurements import GoodputRecord, ProbeRecord, ProfileRecord, ProgressRecord, ReachRecord
from headway.daemon.names import JOB_NAME_RULE, NODE_NAME_RULE, is_job_name, is_node_name
from headway.daemon.planning.blocked_ways import BlockedWays, blocked_ways
from headway.daemon.records import (
    CheckpointRecord,
    DesiredRecord,
    EventRecord,
    Keys,
    LeaderRecord,
    NodeFailureRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlacementRecord,
    PlanRecord,
    SharesRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    UsageRecord,
    WorkerRecord,
    WorkerState,
    decode,
)

WorkerKey = tuple[int, int]
"""(generation, position among the plan's workers)"""

Place = tuple[int, int]
"""(timeline, boundary)"""

DeviceKey = tuple[str, int]
"""(node, device)"""

IN_FORCE: Final = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
"""The phases in which a plan is in force."""

MAX_REMEMBERED: Final = 64
"""Moments of one kind."""


@dataclass(slots=True, kw_only=True)
class JobView:
    """One job: every record below `jobs/<name>/`. Times are of the view's own clock, see `ClusterView.apply`."""

    name: str
    submission: SpecRecord | None = None
    """None while only other keys of the job are known: such a job is not decided about."""
    refusal: str = ""
    """The rule that the submitted spec breaks. `submission` then has a job of default sizes in its place."""
    spec_revision: int = 0
    """Create revision of the spec: the job's place in the queue."""
    desired: DesiredRecord = field(default_factory=DesiredRecord)
    phase: PhaseRecord = field(default_factory=PhaseRecord)
    plan: PlanRecord | None = None
    next: PlanRecord | None = None
    stop: StopRecord | None = None
    checkpoint: CheckpointRecord | None = None
    progress: ProgressRecord | None = None
    workers: dict[WorkerKey, WorkerRecord] = field(default_factory=dict)
    state: dict[Place, dict[str, StateRecord]] = field(default_factory=dict)
    """Who holds what of a boundary of a timeline: node to record."""
    events: dict[int, EventRecord] = field(default_factory=dict)
    goodput: dict[WorkerKey, GoodputRecord] = field(default_factory=dict)
    profiles: dict[DeviceKey, ProfileRecord] = field(default_factory=dict)
    changed_at: tuple[float, ...] = field(default=(), compare=False)
    """When the plan in force was seen to become another one, the last `MAX_REMEMBERED` times."""
    left: PlanRecord | None = field(default=None, compare=False)
    """The plan before the one in force, if it was seen."""
    entered_at: float = 0.0
    """When the job was seen to enter its present phase."""
    started_at: float = field(default=0.0, compare=False)
    """When the job was seen to begin to train, after it had waited."""
    starting_s: float = field(default=0.0, compare=False)
    """How long its workers took to be ready then."""
    stop_changed_at: float = 0.0
    """When `stop` was last seen to change; a stop's deadline counts from here."""
    workers_changed_at: float = 0.0
    """When a worker's record was last seen to change."""
    failed_at: dict[int, float] = field(default_factory=dict, compare=False)
    """When the first worker of a generation was seen to have failed."""

    @property
    def spec(self) -> JobSpec | None:
        """What was submitted, or None while the spec is not known."""
        return self.submission.spec if self.submission is not None else None

    @property
    def user(self) -> str:
        """Who submitted it."""
        return self.submission.user if self.submission is not None else ""

    @property
    def priority(self) -> int:
        """Of the job in the queue."""
        return self.submission.spec.queue.priority if self.submission is not None else 0

    @property
    def uid(self) -> str:
        """Of the submission; empty while the spec is not known."""
        return self.submission.uid if self.submission is not None else ""

    @property
    def devices(self) -> frozenset[DeviceKey]:
        """Those that its plans name: nobody else may use them."""
        plans = [plan for plan in (self.plan, self.next) if plan is not None]
        return frozenset((stage.node, stage.device_index) for plan in plans for stage in plan.stages)

    def workers_of(self, plan: PlanRecord) -> dict[int, WorkerRecord]:
        """The workers that have said something about a plan, by position, if they are on the node that it names."""
        found = {}
        for position, stage in enumerate(plan.stages):
            worker = self.workers.get((plan.generation, position))
            if worker is not None and worker.node == stage.node:
                found[position] = worker
        return found

    def holders(self, timeline: int, boundary: int, layer: str) -> dict[str, StateFile]:
        """Node to file of a layer (`journal` is one) at a boundary; empty if nobody has it."""
        records = self.state.get((timeline, boundary), {})
        return {node: record.files[layer] for node, record in records.items() if layer in record.files}


@dataclass(slots=True, kw_only=True)
class ClusterView:
    """The fold of all keys under the prefix. One owner applies; everybody else reads."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    leader: LeaderRecord | None = None
    failures: dict[str, dict[int, NodeFailureRecord]] = field(default_factory=dict)
    """Of the last minutes, by node and number."""
    jobs: dict[str, JobView] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    """Revision of the last change of every key that exists; a key that is absent has none."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Keys that could not be used, and why."""
    nodes_changed_at: float = 0.0
    """When the set of usable nodes last changed: one came, went, was replaced or began to drain."""
    unrest: Unrest = field(default_factory=Unrest)
    """Which nodes have changed of late."""
    shares: SharesRecord = field(default_factory=SharesRecord)
    usage: UsageMeter = field(default_factory=UsageMeter)
    absent_since: dict[str, float] = field(default_factory=dict)
    """When a node that was seen before was found gone; it may come back, by the same incarnation, after an outage."""
    """Counts from the listing that found it gone, if etcd was out of sight when it went."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    """Since when a node's present incarnation has been there."""
    arrived_in: dict[str, int] = field(default_factory=dict)
    """The revision in which a node's present incarnation was registered when it was first seen; 0: in another epoch."""
    departures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """When a node's incarnations were seen to go, the last `MAX_REMEMBERED` times."""
    probes: dict[str, ProbeRecord] = field(default_factory=dict)
    """What nodes have measured of the ways to their peers."""
    reach: dict[str, ReachRecord] = field(default_factory=dict)
    """Which ports of its peers each node reaches."""
    started_at: float | None = None
    """When the first key was applied, in this epoch."""
    steady_since: float | None = None
    """Since when etcd has been in sight without a break; None: it is not, and absences prove nothing."""
    epoch: int = 0
    """How often etcd's history went back (an older backup, an empty store) so that the view was made anew."""
    _deleted: dict[str, int] = field(default_factory=dict)
    _incarnations: dict[str, str] = field(default_factory=dict)
    """Each node's newest, also while it is absent."""

    def apply(
        self,
        key: str,
        value: bytes | None,
        *,
        mod_revision: int,
        create_revision: int,
        now: float = 0.0,
    ) -> None:
        """Take over one key. value None: deleted, in `mod_revision`.

        now: seconds of this process's monotonic clock. Settle times and deadlines count from it, so that no two
        clocks are ever compared; a new leader therefore gives every wait its full time again.
        """
        if mod_revision <= self.last_revision_of(key):
            return
        if self.started_at is None:
            self.started_at = now
        if value is None:
            self.revisions.pop(key, None)
            self._deleted[key] = mod_revision
        else:
            self.revisions[key] = mod_revision
            self._deleted.pop(key, None)
        self.ignored.pop(key, None)
        try:
            self._fold(key, value, create_revision=create_revision, now=now)
        except (msgspec.MsgspecError, ValueError) as error:
            self.ignored[key] = str(error)

    def set_in_sight(self, is_in_sight: bool, *, now: float) -> None:
        """Note that etcd answers, or that it does not any more."""
        if not is_in_sight:
            self.steady_since = None
        elif self.steady_since is None:
            self.steady_since = now

    def start_anew(self, *, now: float) -> None:
        """Forget every key: etcd's history went back. The nodes that were known count as absent from now on."""
        known = {*self.nodes, *self.absent_since}
        folded = (self.nodes, self.failures, self.probes, self.reach, self.jobs)
        for records in (*folded, self.revisions, self.ignored, self._deleted):
            records.clear()
        self.leader = None
        self.absent_since = dict.fromkeys(known, now)
        self.arrived_in = dict.fromkeys(known, 0)
        self.usage.advance(now)
        self.usage.held.clear()
        self.nodes_changed_at = now
        self.unrest.changed("", now=now)
        self.started_at = now
        self.epoch += 1

    def last_revision_of(self, key: str) -> int:
        """Revision of a key's last change or deletion, as far as it is remembered; 0: never heard of."""
        return max(self.revisions.get(key, 0), self._deleted.get(key, 0))

    def revision_of(self, key: str) -> int:
        """Revision of a key's last change; 0: the key is absent."""
        return self.revisions.get(key, 0)

    def forget_deleted(self, *, below: int) -> None:
        """Drop the memory of deletions older than a revision: nothing that old can arrive any more."""
        self._deleted = {key: revision for key, revision in self._deleted.items() if revision >= below}

    def jobs_in_order(self) -> list[JobView]:
        """Jobs whose spec is known, first in first."""
        return sorted(
            (job for job in self.jobs.values() if job.submission is not None), key=lambda job: job.spec_revision
        )

    def newcomers(self, job: JobView) -> frozenset[str]:
        """Nodes that registered after a job's plan came into force."""
        planned_in = self.revision_of(Keys.of(job.name, "plan"))
        return frozenset(name for name in self.nodes if self.arrived_in.get(name, 0) > planned_in)

    @property
    def blocked(self) -> BlockedWays:
        """The ways between the present processes of nodes on which one does not reach the other."""
        return blocked_ways(self.reach, self.nodes)

    def _fold(self, key: str, value: bytes | None, *, create_revision: int, now: float) -> None:
        if key == Keys.LEADER:
            self.leader = decode(value, LeaderRecord) if value is not None else None
        elif key == Keys.PLACEMENT:
            if value is not None:
                decode(value, PlacementRecord)  # its revision is all that counts
        elif key == Keys.SHARES:
            self.shares = decode(value, SharesRecord) if value is not None else SharesRecord()
            self.usage.advance(now)
            self.usage.half_life_s = max(self.shares.half_life_s, 1.0)
        elif key == Keys.USAGE:
            self.usage.read(decode(value, UsageRecord) if value is not None else UsageRecord(), now=now)
        elif key.startswith(Keys.NODES):
            self._fold_node(key.removeprefix(Keys.NODES), value, create_revision=create_revision, now=now)
        elif key.startswith(Keys.PROBES):
            node = key.removeprefix(Keys.PROBES)
            if value is not None:
                self.probes[node] = decode(value, ProbeRecord)
            else:
                self.probes.pop(node, None)
        elif key.startswith(Keys.REACH):
            node = key.removeprefix(Keys.REACH)
            if value is not None:
                self.reach[node] = decode(value, ReachRecord)
            else:
                self.reach.pop(node, None)
        elif key.startswith(Keys.FAILURES):
            self._fold_failure(key.removeprefix(Keys.FAILURES), value, now=now)
        elif key.startswith(Keys.JOBS):
            name, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
            if not is_job_name(name) or not leaf:
                raise ValueError(f"no job has such a key: a name is {JOB_NAME_RULE}")
            self._fold_job(name, leaf, value, create_revision=create_revision, now=now)
        else:
            raise ValueError("unknown key")

    def _fold_node(self, name: str, value: bytes | None, *, create_revision: int, now: float) -> None:
        if not is_node_name(name):
            raise ValueError(f"no node has such a key: a name is {NODE_NAME_RULE}")
        before = self.nodes.get(name)
        if value is not None:
            self.nodes[name] = decode(value, NodeRecord)
            self.absent_since.pop(name, None)
        elif before is not None:
            del self.nodes[name]
            self.absent_since[name] = now
        after = self.nodes.get(name)
        if before is not None and (after is None or after.incarnation != before.incarnation):
            self.departures[name] = (*self.departures.get(name, ()), now)[-MAX_REMEMBERED:]
        if after is not None and (before is None or after.incarnation != before.incarnation):
            self.arrived_at[name] = now
        if after is not None and after.incarnation != self._incarnations.get(name):
            self._incarnations[name] = after.incarnation
            self.arrived_in[name] = create_revision
        if _membership(before) != _membership(self.nodes.get(name)):
            self.nodes_changed_at = now
            self.unrest.changed(name, now=now)

    def _fold_failure(self, rest: str, value: bytes | None, *, now: float) -> None:
        node, number = rest.split("/")
        if value is not None:
            self.failures.setdefault(node, {})[int(number)] = decode(value, NodeFailureRecord)
        elif node in self.failures:
            self.failures[node].pop(int(number), None)
            if not self.failures[node]:
                del self.failures[node]
        self.nodes_changed_at = now
        self.unrest.changed("", now=now)

    def _fold_job(self, name: str, leaf: str, value: bytes | None, *, create_revision: int, now: float) -> None:
        known = name in self.jobs
        job = self.jobs.get(name) or JobView(name=name, entered_at=now, stop_changed_at=now)
        head, _, rest = leaf.partition("/")
        phase_before, stop_before, plan_before = job.phase, job.stop, job.plan
        if head in _NESTED and rest:
            _NESTED[head](job, rest, value)
            if head == "workers":
                job.workers_changed_at = now
                _note_failures(job, now)
        elif head in _SINGLE and not rest:
            name_of_field, kind, absent = _SINGLE[head]
            setattr(job, name_of_field, decode(value, kind) if value is not None else absent())
        else:
            raise ValueError("unknown key of a job")
        if head == "spec":
            job.spec_revision = create_revision if value is not None else 0
            job.submission, job.refusal = _admitted(job.submission, name)
        if job.phase.phase is not phase_before.phase or job.phase.generation != phase_before.generation:
            if phase_before.phase not in IN_FORCE and job.phase.phase in IN_FORCE:
                job.started_at, job.starting_s = now, now - job.entered_at if known else 0.0
            job.entered_at = now
        if job.stop != stop_before:
            job.stop_changed_at = now
        if plan_before is not None and job.plan is not None and job.plan.generation != plan_before.generation:
            job.left = plan_before
            job.changed_at = (*job.changed_at, now)[-MAX_REMEMBERED:]
        if head in ("spec", "plan", "next"):
            self.usage.hold(name, job.user, len(job.devices), now=now)
        if not known:
            self.jobs[name] = job
        if value is None and job.submission is None:
            prefix = Keys.job(name)
            if not any(other.startswith(prefix) for other in self.revisions):
                del self.jobs[name]


def _admitted(submission: SpecRecord | None, name: str) -> tuple[SpecRecord | None, str]:
    return admitted(submission, name) if submission is not None else (None, "")


def _membership(node: NodeRecord | None) -> tuple[Any, ...] | None:
    """What of a node's record matters for plans: a heartbeat of another field is no change of the cluster."""
    if node is None:
        return None
    return (
        node.incarnation,
        node.is_draining,
        node.down_devices,
        tuple(replace(device, speed=1.0) for device in node.devices),
        node.site,
        node.arithmetic_class,
        node.protocol,
    )


def _fold_worker(job: JobView, rest: str, value: bytes | None) -> None:
    generation, position = (int(part) for part in rest.split("/"))
    if value is None:
        job.workers.pop((generation, position), None)
    else:
        job.workers[generation, position] = decode(value, WorkerRecord)


def _note_failures(job: JobView, now: float) -> None:
    failed = {generation for (generation, _), worker in job.workers.items() if worker.state is WorkerState.FAILED}
    job.failed_at = {generation: job.failed_at.get(generation, now) for generation in failed}


def _fold_state(job: JobView, rest: str, value: bytes | None) -> None:
    timeline, boundary, node = rest.split("/")
    key = (int(timeline), int(boundary))
    if value is not None:
        job.state.setdefault(key, {})[node] = decode(value, StateRecord)
    elif key in job.state:
        job.state[key].pop(node, None)
        if not job.state[key]:
            del job.state[key]


def _fold_event(job: JobView, rest: str, value: bytes | None) -> None:
    if value is None:
        job.events.pop(int(rest), None)
    else:
        job.events[int(rest)] = decode(value, EventRecord)


def _fold_goodput(job: JobView, rest: str, value: bytes | None) -> None:
    generation, position = (int(part) for part in rest.split("/"))
    if value is None:
        job.goodput.pop((generation, position), None)
    else:
        job.goodput[generation, position] = decode(value, GoodputRecord)


def _fold_profile(job: JobView, rest: str, value: bytes | None) -> None:
    node, device = rest.split("/")
    if value is None:
        job.profiles.pop((node, int(device)), None)
    else:
        job.profiles[node, int(device)] = decode(value, ProfileRecord)


_NESTED: Final[dict[str, Callable[[JobView, str, bytes | None], None]]] = {
    "workers": _fold_worker,
    "state": _fold_state,
    "events": _fold_event,
    "goodput": _fold_goodput,
    "profile": _fold_profile,
}

_SINGLE: Final[dict[str, tuple[str, type[Any], Callable[[], Any]]]] = {
    # leaf: (JobView's field, kind of record, what an absent key means)
    "spec": ("submission", SpecRecord, lambda: None),
    "desired": ("desired", DesiredRecord, DesiredRecord),
    "phase": ("phase", PhaseRecord, PhaseRecord),
    "plan": ("plan", PlanRecord, lambda: None),
    "next": ("next", PlanRecord, lambda: None),
    "stop": ("stop", StopRecord, lambda: None),
    "checkpoint": ("checkpoint", CheckpointRecord, lambda: None),
    "progress": ("progress", ProgressRecord, lambda: None),
}
