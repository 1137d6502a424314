"""What etcd says, folded into one value: the nodes, the leader, and every job with its records.

Pure. Keys may come in any order, twice, or late: a key's older revision never replaces a newer one. Keys that nobody
knows and values that cannot be read are set aside in `unreadable` with the reason, and change nothing of anybody else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, Final

from headway.daemon.coordination.nested_records import fold_nested, set_inner_record, set_record
from headway.daemon.coordination.quarantine import QUARANTINE_AFTER, left_out
from headway.daemon.coordination.record_places import (
    DECISIVE,
    RecordPlace,
    Unreadable,
    place_of,
    read_record,
    unreadable,
)
from headway.daemon.coordination.settling import Unrest
from headway.daemon.coordination.start_progress import ReadingSoFar, note_reading, note_storage
from headway.daemon.coordination.usage import UsageMeter
from headway.daemon.jobs.admission import admitted
from headway.daemon.jobs.job import JobSpec
from headway.daemon.measurements import (
    GoodputRecord,
    ProbeRecord,
    ProfileRecord,
    ProgressRecord,
    ReachRecord,
    ReadingRecord,
)
from headway.daemon.planning.blocked_ways import NOTHING_BLOCKED, BlockedWays, blocked_ways
from headway.daemon.planning.plan_devices import devices
from headway.daemon.planning.promises import Promises
from headway.daemon.record_keys import Keys
from headway.daemon.records import (
    CheckpointRecord,
    DesiredRecord,
    DeviceKey,
    EventRecord,
    LeaderRecord,
    NodeFailureRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SharesRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    UsageRecord,
    WorkerRecord,
    WorkerState,
)

WorkerKey = tuple[int, int]
"""(generation, position among the plan's workers)"""

Place = tuple[int, int]
"""(timeline, boundary)"""

IN_FORCE: Final = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
"""The phases in which a plan is in force."""

MAX_REMEMBERED: Final = 64
"""Moments of one kind."""
ABSENT_FOR_S: Final = 86400.0
"""A node that has been gone for so long is forgotten: it would come back as one that nobody knew."""
MAX_ABSENT: Final = 1000
"""Nodes that are gone and not forgotten: those that went last."""
UNREADABLE: Final = -1
"""A revision that no key ever has."""


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
    promises: Promises = field(default_factory=Promises, compare=False)
    """What planned changes promised, and what came of them."""
    left: PlanRecord | None = field(default=None, compare=False)
    """The plan before the one in force, if it was seen."""
    readings: dict[str, ReadingRecord] = field(default_factory=dict)
    """Nodes that read the job's data just now."""
    readings_so_far: dict[str, ReadingSoFar] = field(default_factory=dict, compare=False)
    """Of each such node, in the present phase."""
    read_at: float = field(default=0.0, compare=False)
    """When one of them was last seen to get on, or storage that was away to answer again."""
    entered_at: float = 0.0
    """When the job was seen to enter its present phase."""
    started_at: float = field(default=0.0, compare=False)
    """When the job was seen to begin to train, after it had waited."""
    devices_changed_at: float = field(default=0.0, compare=False)
    """When the devices of the plan in force were seen to become others."""
    starting_s: float = field(default=0.0, compare=False)
    """How long its workers took to be ready then."""
    stop_changed_at: float = 0.0
    """When `stop` was last seen to change; a stop's deadline counts from here."""
    workers_changed_at: float = 0.0
    """When a worker's record was last seen to change."""
    state_changed_at: float = 0.0
    """When a record of files was last seen to change, while the job stops."""
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
        return devices(self.plan) | devices(self.next)

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
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    """Keys that are set aside, because their record cannot be used. Their names may hold any bytes: print them with
    `terminal.printable_name`."""
    nodes_changed_at: float = 0.0
    """When the set of usable nodes last changed: one came, went, was replaced or began to drain."""
    unrest: Unrest = field(default_factory=Unrest)
    """Which nodes have changed of late."""
    shares: SharesRecord = field(default_factory=SharesRecord)
    usage: UsageMeter = field(default_factory=UsageMeter)
    absent_since: dict[str, float] = field(default_factory=dict)
    """When a node that was seen before was found gone; it may come back, by the same incarnation, after an outage."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    """Since when a node's present incarnation has been there."""
    arrived_in: dict[str, int] = field(default_factory=dict)
    """The revision in which a node came (see `newcomers`), as far as it was seen; 0: in another epoch."""
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
    _restored: set[str] = field(default_factory=set)
    """Nodes that have not registered again since etcd's history went back."""
    _incarnations: dict[str, str] = field(default_factory=dict)
    """Each node's newest, also while it is absent."""
    _blocked: tuple[tuple[object, ...], BlockedWays] = field(default=((), NOTHING_BLOCKED), compare=False)
    """The records that `blocked` was computed from last, and what came out: every decision asks for it."""

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
        self.unreadable.pop(key, None)
        try:
            place = place_of(key)
            record = read_record(place, value) if value is not None else None
            if value is None or place.kind is not None:
                self._fold(place, record, create_revision=create_revision, now=now)
        except Exception as error:  # anybody may have written it: whatever is wrong with it is wrong with it alone
            if value is not None:
                self._set_aside(key, error, now=now)

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
        for records in (*folded, self.revisions, self.unreadable, self._deleted):
            records.clear()
        self.leader = None
        self.absent_since = dict.fromkeys(known, now)
        self.arrived_in = dict.fromkeys(known, 0)
        self._restored = known
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
        """Revision of a key's last change; 0: the key is absent.

        UNREADABLE: it is there and cannot be read. No transaction that compares it succeeds.
        """
        return UNREADABLE if key in self.unreadable else self.revisions.get(key, 0)

    def why_set_aside(self, job: str) -> str:
        """Why nothing is decided about a job: the record that cannot be read; empty when all can."""
        for leaf in sorted(DECISIVE) if self.unreadable else ():
            if (found := self.unreadable.get(Keys.of(job, leaf))) is not None:
                return f"its {leaf} cannot be read: {found.reason}"
        return ""

    def forget_deleted(self, *, below: int) -> None:
        """Drop the memory of deletions older than a revision: nothing that old can arrive any more."""
        self._deleted = {key: revision for key, revision in self._deleted.items() if revision >= below}

    def forget_absent(self, *, now: float) -> None:
        """Drop the memory of nodes that have long been gone: machines that are rented have a new name each time."""
        since = self.absent_since
        newest_first = sorted(since, key=lambda name: -since[name])
        kept = {name for name in newest_first[:MAX_ABSENT] if now - since[name] <= ABSENT_FOR_S}
        memories: tuple[dict[str, Any], ...] = (self.arrived_at, self.arrived_in, self.departures, self._incarnations)
        for name in since.keys() - kept:
            for memory in (since, *memories):
                memory.pop(name, None)
            self._restored.discard(name)

    def jobs_in_order(self) -> list[JobView]:
        """Jobs whose spec is known, first in first."""
        return sorted(
            (job for job in self.jobs.values() if job.submission is not None), key=lambda job: job.spec_revision
        )

    def newcomers(self, job: JobView) -> frozenset[str]:
        """Nodes that came after a job's plan came into force, and that it does not have.

        A node comes when it registers, also again after its lease was lost, and when it is released: from draining,
        from quarantine, or with the worker of a device that had none.
        """
        planned_in = self.revision_of(Keys.of(job.name, "plan"))
        own = {(stage.node, stage.node_incarnation) for stage in (job.plan.stages if job.plan is not None else ())}
        return frozenset(
            name
            for name, node in self.nodes.items()
            if self.arrived_in.get(name, 0) > planned_in and (name, node.incarnation) not in own
        )

    @property
    def blocked(self) -> BlockedWays:
        """The ways between the present processes of nodes on which one does not reach the other."""
        rests_on = (*self.nodes.values(), *self.reach.values())
        if len(self._blocked[0]) != len(rests_on) or not all(map(is_, self._blocked[0], rests_on)):
            self._blocked = rests_on, blocked_ways(self.reach, self.nodes)
        return self._blocked[1]

    def _fold(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        """record: None where the key is gone."""
        match place.folder:
            case "leader":
                self.leader = record
            case "shares":
                self.shares = record if record is not None else SharesRecord()
                self.usage.advance(now)
                self.usage.half_life_s = self.shares.half_life_s
            case "usage":
                self.usage.read(record if record is not None else UsageRecord(), now=now)
            case "nodes":
                self._fold_node(place.name, record, create_revision=create_revision, now=now)
            case "probes":
                set_record(self.probes, place.name, record)
            case "reach":
                set_record(self.reach, place.name, record)
            case "failures":
                was_left_out = self._is_left_out(place.name)
                set_inner_record(self.failures, place.name, place.numbers[0], record)
                if was_left_out and not self._is_left_out(place.name):
                    self.arrived_in[place.name] = self.last_revision_of(Keys.failure(place.name, place.numbers[0]))
                self.nodes_changed_at = now
                self.unrest.changed("", now=now)
            case "jobs":
                self._fold_job(place, record, create_revision=create_revision, now=now)

    def _set_aside(self, key: str, error: Exception, *, now: float) -> None:
        """A record that cannot be used is as good as gone, but for one that decides about a job: the last readable one
        stays, so that training goes on under it, and nothing is decided.
        """
        self.unreadable[key] = unreadable(error)
        try:
            place = place_of(key)
        except ValueError:
            return
        if place.folder != "jobs" or place.leaf not in DECISIVE:
            self._fold(place, None, create_revision=0, now=now)

    def _is_left_out(self, node: str) -> bool:
        """Whether a node is in quarantine for all jobs."""
        limit = self.leader.quarantine_after if self.leader is not None else QUARANTINE_AFTER
        return bool(left_out({node: self.failures.get(node, {}).values()}, limit=limit))

    def _fold_node(self, name: str, record: NodeRecord | None, *, create_revision: int, now: float) -> None:
        before = self.nodes.get(name)
        if record is not None:
            self.nodes[name] = record
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
        elif after is not None and before is None:
            if name not in self._restored:  # an older etcd lost what all nodes had written
                self.arrived_in[name] = create_revision
        elif after is not None and before is not None and _offers_more(before, after):
            self.arrived_in[name] = self.revision_of(Keys.node(name))
        if after is not None:
            self._restored.discard(name)
            note_storage(self.jobs.values(), before, after, now=now)
        if _membership(before) != _membership(self.nodes.get(name)):
            self.nodes_changed_at = now
            self.unrest.changed(name, now=now)

    def _fold_job(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        name = place.name
        known = name in self.jobs
        if not known and record is None:
            return
        job = self.jobs.get(name) or JobView(name=name, entered_at=now, stop_changed_at=now)
        phase_before, stop_before, plan_before = job.phase, job.stop, job.plan
        if place.leaf in _SINGLE:
            name_of_field, absent = _SINGLE[place.leaf]
            setattr(job, name_of_field, record if record is not None else absent())
        else:
            fold_nested(job, place, record)
        if place.leaf == "workers":
            job.workers_changed_at = now
            _note_failures(job, now)
        elif place.leaf == "reading" and record is not None:
            note_reading(job, place.node, record, now=now)
        elif place.leaf == "spec":
            job.spec_revision = create_revision if record is not None else 0
            job.submission, job.refusal = _admitted(job.submission, name)
        elif place.leaf == "state" and job.stop is not None:
            job.state_changed_at = now
        elif place.leaf == "progress" and job.progress is not None:
            job.promises = job.promises.progressed(job.progress.generation, job.progress.tokens_per_second)
        if job.phase.phase is not phase_before.phase or job.phase.generation != phase_before.generation:
            if phase_before.phase not in IN_FORCE and job.phase.phase in IN_FORCE:
                job.started_at, job.starting_s = now, now - job.entered_at if known else 0.0
            job.entered_at = now
            job.readings_so_far.clear()
        if job.stop != stop_before:
            job.stop_changed_at = now
        if job.plan is not None and (plan_before is None or job.plan.generation != plan_before.generation):
            job.promises = job.promises.plan_changed(job.plan.generation, factor=job.plan.promised, now=now)
        if plan_before is not None and job.plan is not None and job.plan.generation != plan_before.generation:
            job.left = plan_before
            job.changed_at = (*job.changed_at, now)[-MAX_REMEMBERED:]
        if devices(plan_before) != devices(job.plan):
            job.devices_changed_at = now
        if place.leaf in ("spec", "plan", "next"):
            num_devices = len(job.devices) if job.submission is not None else 0
            self.usage.hold(name, job.user, num_devices, now=now)
        if not known:
            self.jobs[name] = job
        if record is None and job.submission is None:
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
        node.stays_out,
        node.down_devices,
        tuple(replace(device, speed=1.0) for device in node.devices),
        node.site,
        node.site_is_private,
        node.arithmetic_class,
        node.protocol,
    )


def _offers_more(before: NodeRecord, after: NodeRecord) -> bool:
    """Whether plans may use something of a node that they could not use."""
    is_released = before.is_draining and not after.is_draining
    return is_released or not set(before.down_devices) <= set(after.down_devices)


def _note_failures(job: JobView, now: float) -> None:
    failed = {generation for (generation, _), worker in job.workers.items() if worker.state is WorkerState.FAILED}
    job.failed_at = {generation: job.failed_at.get(generation, now) for generation in failed}


_SINGLE: Final[dict[str, tuple[str, Callable[[], Any]]]] = {
    # leaf: (JobView's field, what an absent key means)
    "spec": ("submission", lambda: None),
    "desired": ("desired", DesiredRecord),
    "phase": ("phase", PhaseRecord),
    "plan": ("plan", lambda: None),
    "next": ("next", lambda: None),
    "stop": ("stop", lambda: None),
    "checkpoint": ("checkpoint", lambda: None),
    "progress": ("progress", lambda: None),
}
