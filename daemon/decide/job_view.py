"""Folds the records below `jobs/<name>/` into one value. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from headway.daemon.cluster.measurements import GoodputRecord, ProfileRecord, ProgressRecord, ReadingRecord
from headway.daemon.cluster.records import (
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
from headway.daemon.decide.admission import harmless, why_refused
from headway.daemon.decide.record_places import RecordPlace
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import devices
from headway.daemon.plan.rebalance import Promises

CLASSES: Final = ("useful", "waiting", "replay", "snapshot", "bubble", "recovery", "replan", "idle")
"""Classes of a worker's seconds, as `stages/telemetry/goodput.py` counts them."""
MOST_SECONDS: Final = 1e12
WAITING: Final = "waiting:"
"""Begins the class of seconds in which a worker waits for a peer, which the rest names."""
MOST_READINGS: Final = 3
"""Number of reads that count of one node in one phase: one of a copy that proves damaged, one of its replacement."""


@dataclass(frozen=True, slots=True)
class ReadingSoFar:
    """The reading of one node in the present phase of a job."""

    num_bytes: int
    """Bytes read by the last report."""
    least_left: int
    """Fewest bytes left since the read began."""
    num_begun: int = 1
    """Number of times that the read began from the start."""


def note_reading(job: "JobView", node: str, record: ReadingRecord, *, now: float) -> None:
    """Note a report: a node has progressed when it has less left than ever since it began.

    A read that begins again has as many bytes left as before. That counts a few times, not for ever.
    """
    left = record.total_bytes - record.num_bytes
    known = job.readings_so_far.get(node)
    if known is None:
        job.readings_so_far = job.readings_so_far | {node: ReadingSoFar(record.num_bytes, left)}
    elif record.num_bytes < known.num_bytes and left > known.least_left and known.num_begun < MOST_READINGS:
        job.readings_so_far = job.readings_so_far | {node: ReadingSoFar(record.num_bytes, left, known.num_begun + 1)}
    else:
        least_left = min(left, known.least_left)
        job.readings_so_far = job.readings_so_far | {
            node: replace(known, num_bytes=record.num_bytes, least_left=least_left)
        }
        if left >= known.least_left:
            return
    job.read_at = now


def note_storage(jobs: Iterable["JobView"], before: NodeRecord | None, after: NodeRecord, *, now: float) -> None:
    """Note that a node no longer reports unreadable storage."""
    for job in jobs if before is not None and before.ailments != after.ailments else ():
        if before is not None and before.storage_trouble(job.name) and not after.storage_trouble(job.name):
            job.read_at = now


WorkerKey = tuple[int, int]
"""(generation, position among the plan's workers)"""

Place = tuple[int, int]
"""(timeline, boundary)"""

IN_FORCE: Final = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING, Phase.RECOVERING)
"""Phases in which a plan is in force."""

MAX_REMEMBERED: Final = 64
"""Maximum number of moments remembered of one kind."""


@dataclass(slots=True, kw_only=True)
class JobView:
    """One job: every record below `jobs/<name>/`. Times are of the view's own clock, see `ClusterView.apply`.

    A value: a change of a record makes another view of the job, and what is the same stays the same object.
    """

    name: str
    submission: SpecRecord | None = None
    """The submission; None while only other keys of the job are known, and then the coordinator skips the job."""
    refusal: str = ""
    """The rule that the submission breaks. `submission` then holds a job of default sizes."""
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
    departed: dict[WorkerKey, GoodputRecord] = field(default_factory=dict, compare=False)
    """Last records of goodput of the plan in force whose nodes are gone: what was spent stays spent."""
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

    @property
    def newest_goodput(self) -> Sequence[GoodputRecord]:
        """Return the newest record of each worker process: its seconds go on from plan to plan."""
        return tuple({record.incarnation: record for _, record in sorted(self.goodput.items())}.values())

    @property
    def spent_s(self) -> dict[str, float]:
        """Return the seconds by class of all workers of all plans; waiting for a peer is one class, for all peers."""
        totals = dict(self.phase.spent_s)
        for (generation, _), record in (self.departed | self.goodput).items():
            if self.plan is None or generation != self.plan.generation:
                continue
            for sign, seconds in ((1, record.seconds), (-1, record.earlier)):
                for kind, value in seconds.items():
                    merged = "waiting" if kind.startswith(WAITING) else kind
                    totals[merged] = totals.get(merged, 0.0) + sign * value
        return totals

    @property
    def newest_batch(self) -> int:
        """Return the newest batch of the plan in force whose loss is known; -1: none."""
        told, plan = self.progress, self.plan
        return told.batch if told is not None and plan is not None and told.generation == plan.generation else -1

    @property
    def told_s(self) -> dict[str, float]:
        """Return `spent_s` for a record, which anybody's record of goodput must leave short and readable."""
        spent = self.spent_s
        return {kind: round(spent[kind], 1) for kind in CLASSES if 0.0 < spent.get(kind, 0.0) < MOST_SECONDS}

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
        for position, stage in enumerate(plan.workers):
            worker = self.workers.get((plan.generation, position))
            if worker is not None and worker.node == stage.node:
                found[position] = worker
        return found

    def holders(self, timeline: int, boundary: int, layer: str) -> dict[str, StateFile]:
        """Return the nodes that hold a layer (or `journal`) at a boundary, with their files."""
        records = self.state.get((timeline, boundary), {})
        return {node: record.files[layer] for node, record in records.items() if layer in record.files}

    def fold(self, place: RecordPlace, record: Any, *, create_revision: int, is_new: bool, now: float) -> None:
        """Fold in one record of the job; None: its key is gone. is_new: no record of the job was known before."""
        phase_before, stop_before, plan_before, progress_before = self.phase, self.stop, self.plan, self.progress
        if place.leaf in _SINGLE:
            name_of_field, absent = _SINGLE[place.leaf]
            setattr(self, name_of_field, record if record is not None else absent())
        else:
            fold_nested(self, place, record)
        if place.leaf == "workers":
            self.workers_changed_at = now
            self._note_failures(now)
        elif place.leaf == "reading" and record is not None:
            note_reading(self, place.node, record, now=now)
        elif place.leaf == "spec":
            self.spec_revision = create_revision if record is not None else 0
            self.refusal = why_refused(record, self.name) if record is not None else ""
            if self.refusal and record is not None:
                self.submission = harmless(record, self.name)
        elif place.leaf == "state" and self.stop is not None:
            self.state_changed_at = now
        elif place.leaf == "progress" and self.progress is not None:
            fresh = self.spec.train.sync_batches if self.spec is not None else 0
            if progress_before is not None and progress_before.batch < fresh <= self.progress.batch:
                self.promises = replace(self.promises, paces=())  # those of batches without delay, which are slower
            self.promises = self.promises.progressed(self.progress.generation, self.progress.tokens_per_second)
        if self.phase.phase is not phase_before.phase or self.phase.generation != phase_before.generation:
            # A recovery is not a start: the time slice counts from the first batch since the job waited.
            if phase_before.phase not in IN_FORCE and self.phase.phase in IN_FORCE:
                self.started_at, self.starting_s = now, now - self.entered_at if not is_new else 0.0
            self.entered_at = now
            self.readings_so_far = {}
        if self.stop != stop_before:
            self.stop_changed_at = now
        if self.plan is not None and (plan_before is None or self.plan.generation != plan_before.generation):
            self.promises = self.promises.plan_changed(self.plan.generation, factor=self.plan.promised, now=now)
        if plan_before is not None and self.plan is not None and self.plan.generation != plan_before.generation:
            self.left = plan_before
            self.changed_at = (*self.changed_at, now)[-MAX_REMEMBERED:]
        if place.leaf == "plan" and self.departed:
            self.departed = {
                key: one for key, one in self.departed.items() if self.plan and key[0] == self.plan.generation
            }
        if devices(plan_before) != devices(self.plan):
            self.devices_changed_at = now

    def _note_failures(self, now: float) -> None:
        failed = {generation for (generation, _), worker in self.workers.items() if worker.state is WorkerState.FAILED}
        self.failed_at = {generation: self.failed_at.get(generation, now) for generation in failed}


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


def fold_nested(job: "JobView", place: RecordPlace, record: Any) -> None:
    """Apply a record, or its deletion, for a key with several parts."""
    match place.leaf:
        case "workers":
            generation, position = place.numbers
            job.workers = with_record(job.workers, (generation, position), record)
        case "goodput":
            generation, position = place.numbers
            gone = job.goodput.get((generation, position)) if record is None else None
            if job.plan is not None and generation == job.plan.generation and position < len(job.plan.workers):
                job.departed = with_record(job.departed, (generation, position), gone)
            job.goodput = with_record(job.goodput, (generation, position), record)
        case "state":
            timeline, boundary = place.numbers
            job.state = with_inner_record(job.state, (timeline, boundary), place.node, record)
        case "events":
            job.events = with_record(job.events, place.numbers[0], record)
        case "profile":
            job.profiles = with_record(job.profiles, (place.node, place.numbers[0]), record)
        case "reading":
            job.readings = with_record(job.readings, place.node, record)


def with_record(records: dict[Any, Any], key: object, record: Any) -> dict[Any, Any]:
    """Return the records with another one; None: without the present one."""
    if record is not None:
        return records | {key: record}
    return {other: known for other, known in records.items() if other != key} if key in records else records


def with_inner_record(records: dict[Any, dict[Any, Any]], outer: object, key: object, record: Any) -> dict[Any, Any]:
    """As `with_record`, one level deeper; an empty level is removed."""
    return with_record(records, outer, with_record(records.get(outer, {}), key, record) or None)
