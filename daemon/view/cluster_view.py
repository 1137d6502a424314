"""Folds etcd's content into one value: the nodes, the leader, and every job with its records.

Pure. Keys may come in any order, twice, or late: a key's older revision never replaces a newer one. Unknown keys and
unreadable values are set aside in `unreadable` with the reason; they change nothing else.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headway.daemon.costs.blocked_ways import BlockedWays, blocked_ways
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.plan_devices import devices
from headway.daemon.planning.promises import Promises
from headway.daemon.records.certificate_records import IssuedRecord, RevokedRecord
from headway.daemon.records.cluster_records import LeaderRecord, NodeFailureRecord, SharesRecord, UsageRecord
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import (
    GoodputRecord,
    ProbeRecord,
    ProfileRecord,
    ProgressRecord,
    ReachRecord,
    ReadingRecord,
)
from headway.daemon.records.records import (
    CheckpointRecord,
    DesiredRecord,
    DeviceKey,
    EventRecord,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    StopRecord,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.records.retired_record import RetiredRecord
from headway.daemon.records.signature import Signature
from headway.daemon.view.admission import harmless, why_refused
from headway.daemon.view.derived import Derived
from headway.daemon.view.generations_seen import GenerationsSeen
from headway.daemon.view.nested_records import fold_nested, set_inner_record, set_record
from headway.daemon.view.quarantine import QUARANTINE_AFTER, left_out
from headway.daemon.view.record_places import DECISIVE, RecordPlace, Unreadable, place_of, read_record, unreadable
from headway.daemon.view.settling import Unrest
from headway.daemon.view.start_progress import ReadingSoFar, note_reading, note_storage
from headway.daemon.view.usage import UsageMeter

WorkerKey = tuple[int, int]
"""(generation, position among the plan's workers)"""

Place = tuple[int, int]
"""(timeline, boundary)"""

IN_FORCE: Final = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
"""Phases in which a plan is in force."""

MAX_REMEMBERED: Final = 64
"""Maximum number of moments remembered of one kind."""
ABSENT_FOR_S: Final = 86400.0
"""A node that has been absent this long is forgotten: if it returns, it counts as new."""
MAX_ABSENT: Final = 1000
"""Maximum number of absent nodes remembered, the latest first."""
NOT_REPORTED: Final = GoodputRecord(node="", incarnation="")
"""Stands for the report of a worker that has made none."""
UNREADABLE: Final = -1
"""A revision that no key has."""


@dataclass(slots=True, kw_only=True)
class JobView:
    """One job: every record below `jobs/<name>/`. Times are of the view's own clock, see `ClusterView.apply`."""

    name: str
    submission: SpecRecord | None = None
    """The submission; None while only other keys of the job are known, and then the coordinator skips the job."""
    refusal: str = ""
    """The rule that the submitted spec breaks. `submission` then holds a job of default sizes."""
    signers: frozenset[str] = frozenset()
    """Names in the certificate of the operator who signed it, in small letters."""
    withheld: SpecRecord | None = field(default=None, compare=False, repr=False)
    """The submission of a revoked operator, for the case that the name is restored."""
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
    """Holders of the parts of a boundary of a timeline: node to record."""
    events: dict[int, EventRecord] = field(default_factory=dict)
    goodput: dict[WorkerKey, GoodputRecord] = field(default_factory=dict)
    profiles: dict[DeviceKey, ProfileRecord] = field(default_factory=dict)
    changed_at: tuple[float, ...] = field(default=(), compare=False)
    """Times at which the plan in force was seen to change, the last `MAX_REMEMBERED`."""
    promises: Promises = field(default_factory=Promises, compare=False)
    """Promised gains of planned changes, and their results."""
    left: PlanRecord | None = field(default=None, compare=False)
    """The plan before the one in force, if it was seen."""
    readings: dict[str, ReadingRecord] = field(default_factory=dict)
    """Nodes that are reading the job's data."""
    readings_so_far: dict[str, ReadingSoFar] = field(default_factory=dict, compare=False)
    """Progress of each such node in the present phase."""
    read_at: float = field(default=0.0, compare=False)
    """Time at which a reader was last seen to progress, or storage to answer again."""
    entered_at: float = 0.0
    """Time at which the job was seen to enter its present phase."""
    started_at: float = field(default=0.0, compare=False)
    """Time at which the job was seen to start training, after it had waited."""
    devices_changed_at: float = field(default=0.0, compare=False)
    """Time at which the devices of the plan in force were seen to change."""
    starting_s: float = field(default=0.0, compare=False)
    """Seconds that its workers took to be ready then."""
    stop_changed_at: float = 0.0
    """Time at which `stop` was last seen to change; a stop's deadline counts from it."""
    workers_changed_at: float = 0.0
    """Time at which a worker's record was last seen to change."""
    state_changed_at: float = 0.0
    """Time at which a record of files was last seen to change, while the job stops."""
    failed_at: dict[int, float] = field(default_factory=dict, compare=False)
    """Time at which the first worker of a generation was seen to have failed."""
    num_changes: int = field(default=0, compare=False)
    """Number of changes of its records, beside `progress` and what decisions do not read of `goodput`."""

    def refuse(self, why: str) -> None:
        """Put the submission into harmless form, and note the first reason; an empty one does nothing."""
        if why and not self.refusal and self.submission is not None:
            self.submission, self.refusal = harmless(self.submission, self.name), why

    def signed_so(self, signature: Signature) -> None:
        """Take over what the submission's signature is worth."""
        self.signers = signature.names
        self.refuse(signature.fault)

    @property
    def spec(self) -> JobSpec | None:
        """Return the submitted spec, or None while it is unknown."""
        return self.submission.spec if self.submission is not None else None

    @property
    def trains_tie(self) -> bool:
        """Return whether the first and the last stage train one matrix."""
        return self.spec is not None and self.spec.model.trains_tie

    @property
    def user(self) -> str:
        """Return the user who submitted the job."""
        return self.submission.user if self.submission is not None else ""

    @property
    def priority(self) -> int:
        """Return the job's priority in the queue."""
        return self.submission.spec.queue.priority if self.submission is not None else 0

    @property
    def uid(self) -> str:
        """Return the submission's id; empty while the spec is unknown."""
        return self.submission.uid if self.submission is not None else ""

    @property
    def devices(self) -> frozenset[DeviceKey]:
        """Return the devices in its plans: no other job may use them."""
        return devices(self.plan) | devices(self.next)

    def workers_of(self, plan: PlanRecord) -> dict[int, WorkerRecord]:
        """Return, by position, the workers that have reported on a plan from the node that the plan names."""
        found = {}
        for position, stage in enumerate(plan.stages):
            worker = self.workers.get((plan.generation, position))
            if worker is not None and worker.node == stage.node:
                found[position] = worker
        return found

    def holders(self, timeline: int, boundary: int, layer: str) -> dict[str, StateFile]:
        """Return the nodes that hold a layer (or `journal`) at a boundary, with their files."""
        records = self.state.get((timeline, boundary), {})
        return {node: record.files[layer] for node, record in records.items() if layer in record.files}


@dataclass(slots=True, kw_only=True)
class ClusterView:
    """The fold of all keys under the prefix. One owner applies changes; everybody else reads."""

    nodes: dict[str, NodeRecord] = field(default_factory=dict)
    leader: LeaderRecord | None = None
    failures: dict[str, dict[int, NodeFailureRecord]] = field(default_factory=dict)
    """Recent failures by node and number."""
    jobs: dict[str, JobView] = field(default_factory=dict)
    retired: dict[str, RetiredRecord] = field(default_factory=dict)
    """What is left of jobs whose records were deleted."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Revision of the last change of every key that exists; an absent key has none."""
    unreadable: dict[str, Unreadable] = field(default_factory=dict)
    """Keys that are set aside because their record cannot be used. Their names may hold any bytes: print them with
    `terminal.printable_name`.
    """
    nodes_changed_at: float = 0.0
    """Time of the last change of the set of usable nodes: one came, went, was replaced or began to drain."""
    unrest: Unrest = field(default_factory=Unrest)
    """Recent changes of nodes."""
    shares: SharesRecord = field(default_factory=SharesRecord)
    usage: UsageMeter = field(default_factory=UsageMeter)
    absent_since: dict[str, float] = field(default_factory=dict)
    """Time at which a known node was found gone; it may return after an outage in its old incarnation."""
    arrived_at: dict[str, float] = field(default_factory=dict)
    """Time since which a node's present incarnation has been there."""
    arrived_in: dict[str, int] = field(default_factory=dict)
    """Revision in which a node came (see `newcomers`), as far as it was seen; 0: in another epoch."""
    departures: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Times at which a node's incarnations were seen to go, the last `MAX_REMEMBERED`."""
    probes: dict[str, ProbeRecord] = field(default_factory=dict)
    """Measurements that nodes made of the ways to their peers."""
    reach: dict[str, ReachRecord] = field(default_factory=dict)
    """Reachability of each node's peers, by port."""
    issued: dict[str, IssuedRecord] = field(default_factory=dict)
    """Newest certificates that were made for invitations, by name in small letters."""
    revoked: dict[str, RevokedRecord] = field(default_factory=dict)
    """Names whose certificates count no more, in small letters. No such node is among `nodes`."""
    revoked_in: dict[str, int] = field(default_factory=dict)
    """Revision in which each of them was revoked. No clock decides what came first."""
    started_at: float | None = None
    """Time at which the first key of this epoch was applied."""
    steady_since: float | None = None
    """Time since which etcd has been in sight without a break; None: it is away, and absences prove nothing."""
    epoch: int = 0
    """Number of times that etcd's history went back (an older backup, an empty store), so that the view was rebuilt."""
    _deleted: dict[str, int] = field(default_factory=dict)
    _num_keys: Counter[str] = field(default_factory=Counter, compare=False)
    """Number of present keys below each job."""
    _restored: set[str] = field(default_factory=set)
    """Nodes that have not registered again since etcd's history went back."""
    _incarnations: dict[str, str] = field(default_factory=dict)
    """Newest incarnation of each node, also while it is absent."""
    _shut_out: dict[str, tuple[NodeRecord, int]] = field(default_factory=dict)
    """Records of revoked nodes with their create revisions, for the case that the name is restored."""
    judge_signature: Callable[[bytes, SpecRecord], Signature] | None = field(default=None, compare=False, repr=False)
    """Judges a submission as it lies in etcd; None: anybody's counts."""
    num_changes: int = field(default=0, compare=False)
    """Number of changes of anything but one job's own records; which devices it has counts among the others."""
    num_node_changes: int = field(default=0, compare=False)
    """Number of changes of which nodes there are, where they are, and whom they reach."""
    num_record_changes: int = field(default=0, compare=False)
    """Number of changes of what nodes say of themselves, beside the generations that they have seen."""
    num_probe_changes: int = field(default=0, compare=False)
    """Number of changes of measured ways."""
    generations: GenerationsSeen = field(default_factory=GenerationsSeen, compare=False, repr=False)
    """What the present nodes have seen."""
    derived: Derived = field(default_factory=Derived, compare=False, repr=False)
    """What follows from records of nodes alone, whichever job asks for it."""

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
            if self.revisions.pop(key, None) is not None:
                self._count_key(key, -1)
            self._deleted[key] = mod_revision
        else:
            if key not in self.revisions:
                self._count_key(key, 1)
            self.revisions[key] = mod_revision
            self._deleted.pop(key, None)
        if self.unreadable.pop(key, None) is not None:
            self.num_changes += 1
        try:
            place = place_of(key)
            record = read_record(place, value) if value is not None else None
            signature = None
            if isinstance(record, SpecRecord) and value is not None and self.judge_signature is not None:
                signature = self.judge_signature(value, record)
            if value is None or place.kind is not None:
                self._fold(place, record, create_revision=create_revision, now=now)
            if signature is not None:
                self.jobs[place.name].signed_so(signature)
            if isinstance(record, SpecRecord):
                self._judge_signer(self.jobs[place.name])
        except Exception as error:  # anybody may have written the value: an error in it concerns that key alone
            if value is not None:
                self._set_aside(key, error, now=now)

    def _count_key(self, key: str, by: int) -> None:
        """Count a key that came or went below its job."""
        if key.startswith(Keys.JOBS):
            name = key.removeprefix(Keys.JOBS).partition("/")[0]
            self._num_keys[name] += by
            if not self._num_keys[name]:
                del self._num_keys[name]

    def is_revoked(self, name: str) -> bool:
        """Return whether no certificate of a name counts."""
        return name.casefold() in self.revoked

    def set_in_sight(self, is_in_sight: bool, *, now: float) -> None:
        """Note that etcd answers, or that it no longer does."""
        self.num_changes += 1
        if not is_in_sight:
            self.steady_since = None
        elif self.steady_since is None:
            self.steady_since = now

    def start_anew(self, *, now: float) -> None:
        """Forget every key, because etcd's history went back. The known nodes count as absent from now on."""
        known = {*self.nodes, *self.absent_since}
        folded = (
            self.nodes,
            self.failures,
            self.probes,
            self.reach,
            self.jobs,
            self.retired,
            self.issued,
            self.revoked,
        )
        notes = (self.revoked_in, self._shut_out, self._num_keys, self.revisions, self.unreadable, self._deleted)
        for records in (*folded, *notes):
            records.clear()
        self.leader = None
        self.generations.clear()
        self.absent_since = dict.fromkeys(known, now)
        self.arrived_in = dict.fromkeys(known, 0)
        self._restored = known
        self.usage.advance(now)
        self.usage.held.clear()
        self.nodes_changed_at = now
        self.unrest.changed("", now=now)
        self.started_at = now
        self.epoch += 1
        self.num_changes += 1
        self.num_node_changes += 1
        self.num_record_changes += 1
        self.num_probe_changes += 1

    def last_revision_of(self, key: str) -> int:
        """Return the revision of a key's last change or deletion, if remembered; 0: unknown."""
        return max(self.revisions.get(key, 0), self._deleted.get(key, 0))

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's last change; 0: the key is absent.

        UNREADABLE: the key exists and cannot be read. No transaction that compares it succeeds.
        """
        return UNREADABLE if key in self.unreadable else self.revisions.get(key, 0)

    def why_set_aside(self, job: str) -> str:
        """Return which unreadable record blocks decisions about a job; empty: none."""
        for leaf in sorted(DECISIVE) if self.unreadable else ():
            if (found := self.unreadable.get(Keys.of(job, leaf))) is not None:
                return f"its {leaf} cannot be read: {found.reason}"
        return ""

    def forget_deleted(self, *, below: int) -> None:
        """Drop the memory of deletions older than a revision: nothing that old can arrive now."""
        self._deleted = {key: revision for key, revision in self._deleted.items() if revision >= below}

    def forget_absent(self, *, now: float) -> None:
        """Drop the memory of nodes that have long been gone: rented machines have a new name each time."""
        since = self.absent_since
        newest_first = sorted(since, key=lambda name: -since[name])
        kept = {name for name in newest_first[:MAX_ABSENT] if now - since[name] <= ABSENT_FOR_S}
        memories: tuple[dict[str, Any], ...] = (self.arrived_at, self.arrived_in, self.departures, self._incarnations)
        for name in since.keys() - kept:
            self.num_changes += 1
            for memory in (since, *memories):
                memory.pop(name, None)
            self._restored.discard(name)

    def retired_generation(self, name: str) -> int:
        """Return the highest generation of jobs of a name that were retired; 0: none."""
        found = self.retired.get(name)
        return found.generation if found is not None else 0

    def jobs_in_order(self) -> list[JobView]:
        """Return the jobs whose spec is known, first in first."""
        return sorted(
            (job for job in self.jobs.values() if job.submission is not None), key=lambda job: job.spec_revision
        )

    def newcomers(self, job: JobView, among: Iterable[str]) -> frozenset[str]:
        """Return those of some nodes that came after a job's plan came into force, and that are not in the plan.

        A node comes when it registers, also again after its lease was lost. It comes when it is released from draining
        or quarantine, and when a device that had no worker gets one.
        """
        planned_in = self.revision_of(Keys.of(job.name, "plan"))
        own = {(stage.node, stage.node_incarnation) for stage in (job.plan.stages if job.plan is not None else ())}
        return frozenset(
            name
            for name in among
            if (node := self.nodes.get(name)) is not None
            and self.arrived_in.get(name, 0) > planned_in
            and (name, node.incarnation) not in own
        )

    @property
    def blocked(self) -> BlockedWays:
        """Return the ways between the present processes of nodes that are blocked."""
        rests_on = (self.num_record_changes, self.num_node_changes)
        return self.derived.of("blocked", rests_on, lambda: blocked_ways(self.reach, self.nodes))

    def _fold(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        """Fold one record in. record: None if the key is gone."""
        if place.folder not in ("jobs", "nodes"):
            self.num_changes += 1
        if place.folder == "reach":
            self.num_node_changes += 1
        match place.folder:
            case "leader":
                self.leader = record
            case "shares":
                self.shares = record if record is not None else SharesRecord()
                self.usage.advance(now)
                self.usage.half_life_s = self.shares.half_life_s
            case "usage":
                self.usage.read(record if record is not None else UsageRecord(), now=now)
            case "retired":
                set_record(self.retired, place.name, record)
            case "issued":
                set_record(self.issued, place.name, record)
            case "revoked":
                set_record(self.revoked, place.name, record)
                set_record(self.revoked_in, place.name, create_revision or None)
                self._shut_out_or_readmit(place.name, now=now)
            case "nodes":
                if self.is_revoked(place.name):
                    shut_out = (record, create_revision) if record is not None else None
                    set_record(self._shut_out, place.name, shut_out)
                    record = None
                self._fold_node(place.name, record, create_revision=create_revision, now=now)
            case "probes":
                self.num_probe_changes += 1
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

    def _shut_out_or_readmit(self, name: str, *, now: float) -> None:
        """Apply that a name, in small letters, was revoked or restored."""
        is_revoked = name in self.revoked
        for node in [node for node in (self.nodes if is_revoked else self._shut_out) if node.casefold() == name]:
            if is_revoked:
                self._shut_out[node] = (self.nodes[node], self.arrived_in.get(node, 0))
                self._fold_node(node, None, create_revision=0, now=now)
            else:
                record, create_revision = self._shut_out.pop(node)
                self._fold_node(node, record, create_revision=create_revision, now=now)
        for job in self.jobs.values():
            if name in job.signers:
                self._judge_signer(job)

    def _judge_signer(self, job: JobView) -> None:
        """Refuse a job whose signer had been revoked when it came to etcd; earlier ones go on.

        Revisions decide: a submission's time is by the clock of the operator, who may have turned it back.
        """
        came_in = self.revisions.get(Keys.of(job.name, "spec"), 0)
        found = next((name for name in sorted(job.signers) if self.revoked_in.get(name, came_in) < came_in), "")
        if found and not job.refusal and job.submission is not None:
            job.withheld, signed_by = job.submission, job.submission.signed_by
            who = signed_by if signed_by.casefold() == found else found
            job.refuse(f"{who} had been revoked when it was submitted")
        elif not found and job.withheld is not None:
            job.submission, job.refusal, job.withheld = job.withheld, "", None

    def _set_aside(self, key: str, error: Exception, *, now: float) -> None:
        """Treat an unusable record as deleted, unless it decides about a job. In that case the last readable one stays.

        Training continues under that record, and the coordinator decides nothing about the job.
        """
        self.unreadable[key] = unreadable(error)
        self.num_changes += 1
        try:
            place = place_of(key)
        except ValueError:
            return
        if place.folder != "jobs" or place.leaf not in DECISIVE:
            self._fold(place, None, create_revision=0, now=now)

    def _is_left_out(self, node: str) -> bool:
        """Return whether a node is in quarantine for all jobs."""
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
            if name not in self._restored:  # an older etcd has lost the writes of all nodes
                self.arrived_in[name] = create_revision
        elif after is not None and before is not None and _offers_more(before, after):
            self.arrived_in[name] = self.revision_of(Keys.node(name))
        if after is not None:
            self._restored.discard(name)
            note_storage(self.jobs.values(), before, after, now=now)
        if _membership(before) != _membership(after):
            self.nodes_changed_at = now
            self.unrest.changed(name, now=now)
        has_seen_more = self.generations.replace(before, after)
        says_more = _without_generations(before) != _without_generations(after)
        self.num_record_changes += says_more
        self.num_changes += has_seen_more or says_more
        if _whereabouts(before) != _whereabouts(after):
            self.num_node_changes += 1

    def _fold_job(self, place: RecordPlace, record: Any, *, create_revision: int, now: float) -> None:
        name = place.name
        known = name in self.jobs
        # A deletion of a key that was never seen must not create the job.
        if not known and record is None:
            return
        job = self.jobs.get(name) or JobView(name=name, entered_at=now, stop_changed_at=now)
        phase_before, stop_before, plan_before = job.phase, job.stop, job.plan
        if _is_read(job, place, record):
            job.num_changes += 1
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
            job.refusal, job.withheld = "", None
            job.signers = frozenset({record.signed_by.casefold()}) if record is not None else frozenset()
            job.refuse(why_refused(record, name) if record is not None else "")
        elif place.leaf == "state" and job.stop is not None:
            job.state_changed_at = now
        elif place.leaf == "progress" and job.progress is not None:
            job.promises = job.promises.progressed(job.progress.generation, job.progress.tokens_per_second)
        if job.phase.phase is not phase_before.phase or job.phase.generation != phase_before.generation:
            # A recovery is not a start: the time slice counts from the first batch since the job waited.
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
            # Only these keys change the job's devices or its user, by which use is counted.
            self.num_changes += 1
            num_devices = len(job.devices) if job.submission is not None else 0
            self.usage.hold(name, job.user, num_devices, now=now)
        if not known:
            self.jobs[name] = job
        # Keys arrive in any order, so the job stays until the last of them is gone.
        if record is None and job.submission is None and not self._num_keys[name]:
            del self.jobs[name]
            self.num_changes += 1
            self.derived = Derived()  # a name that never comes again would be remembered for ever


def _is_read(job: JobView, place: RecordPlace, record: Any) -> bool:
    """Return whether decisions about other jobs, or more than this job's outlook, may rest on a record."""
    if place.leaf != "goodput":
        return place.leaf != "progress"
    generation, position = place.numbers
    before = job.goodput.get((generation, position), NOT_REPORTED)
    return bool(before.awaited_worker != (record or NOT_REPORTED).awaited_worker)


def _membership(node: NodeRecord | None) -> tuple[Any, ...] | None:
    """Return the fields of a node's record that matter for plans: any other change is only a heartbeat."""
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


def _without_generations(node: NodeRecord | None) -> NodeRecord | None:
    """Return a node's record without what it has seen: every plan of any job makes every node say more of that."""
    return replace(node, generations={}) if node is not None else None


def _whereabouts(node: NodeRecord | None) -> tuple[Any, ...] | None:
    """Return the fields that decide where copies of a job's state are, and whether they count."""
    if node is None:
        return None
    return node.incarnation, node.protocol, node.host, node.site, node.is_draining


def _offers_more(before: NodeRecord, after: NodeRecord) -> bool:
    """Return whether plans may now use something of a node that they could not use before."""
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
