"""What a daemon wants of a worker, what the worker says of itself, and what is to be done between the two. Pure.

The daemon sends a `Goal` whenever it changes, and the whole of it. The worker sends an `Actual` every second and at
each change. Both ends ask `next_action`: the worker does it, and the daemon knows what is not done yet.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import msgspec

from headway.daemon.cluster.measurements import (
    DeviceSpeed,
    LayerTime,
    LinkCuts,
)
from headway.daemon.cluster.records import (
    Failure,
    PlanRecord,
)
from headway.daemon.cluster.state_key import transfer_s
from headway.daemon.jobs.job import JobSpec, preparation_s
from headway.daemon.plan.layer_costs import layer_costs

LOADING_S: Final = 300.0
"""Time to load or to write layers, in addition to the time for their bytes."""
RELEASE_S: Final = 60.0


class SourceKind(StrEnum):
    """Kinds of sources from which a worker loads a layer."""

    LIVE = "live"
    """Already in this process, at this boundary."""
    INITIAL = "initial"
    """A function of the seed, at boundary 0."""
    FILE = "path"
    """A verified local file."""


@dataclass(frozen=True, slots=True)
class Source:
    """One layer's source; `path` is empty unless it is a file."""

    layer: str
    """`journal` too, for the last stage."""
    kind: SourceKind
    path: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another worker of the plan with a link: of the stage before or after, or of the worker's own stage."""

    position: int
    address: str
    """host:port, for the side that dials."""
    incarnation: str
    is_collective: bool = False
    """Whether the link is a torch.distributed group of two; else it is gRPC."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """All workers with which a worker has a link."""

    upstream: tuple[Neighbour, ...] = ()
    """Workers of the earlier stage that share a reduction group with it."""
    downstream: tuple[Neighbour, ...] = ()
    siblings: tuple[Neighbour, ...] = ()
    """Other replicas of its stage."""
    tied: tuple[Neighbour, ...] = ()
    """Workers of the other end of a tied embedding that share a group with it, unless the ends are neighbours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """A plan for which a worker gets ready while it may still compute by another."""

    plan: PlanRecord
    position: int
    """Position of the worker in the plan."""
    data_paths: tuple[str, ...] = ()
    """Folder of each data source's token shards; empty except on the first stage."""
    data_states: tuple[str, ...] = ()
    """State of each folder when the daemon verified it; an empty one: verify it."""
    plugins_path: str = ""
    """Folder with the wheel of the job's plug-ins; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A plan by which a worker computes, and what it begins with."""

    plan: PlanRecord
    position: int
    sources: tuple[Source, ...] = ()
    neighbours: Neighbours = Neighbours()
    state_dir: str = ""
    """Files go to <state_dir>/<boundary>/<layer>.safetensors."""
    takes_snapshots: bool = True
    """False if another replica of the stage on this node takes the snapshots."""
    source_job: str = ""
    """Job that wrote the sources' files; empty: the job itself."""
    num_damaged: int = 0
    """Damaged files that were replaced before: a worker that has refused another one waits for the next attempt."""

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the worker's layers."""
        return self.plan.workers[self.position].layers

    @property
    def has_live_sources(self) -> bool:
        """Return whether some layer is already in the process."""
        return any(source.kind is SourceKind.LIVE for source in self.sources)


@dataclass(frozen=True, slots=True)
class Spacing:
    """The interval of a worker's snapshots: every factor-th, counted from the boundary at which this was decided."""

    factor: int = 1
    boundary: int = -1


class Goal(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Everything that a daemon wants of a worker. What follows `start` is about the generation of `start`."""

    ends: bool = False
    """Whether the process is to end."""
    job: str = ""
    """Job to serve; empty: none."""
    spec: JobSpec | None = None
    log_path: str = ""
    """File for the worker's output while it serves this job."""
    device_index: int = 0
    """The device that this process computes on; a spare learns it only here."""
    prepare: Preparation | None = None
    start: Start | None = None
    chooses_stop: bool = False
    """Whether this worker, the lead of the first stage, is to choose where all stop."""
    stop_at: int | None = None
    """The boundary at which it stops."""
    write: tuple[str, ...] = ()
    """Parts to write when it stands at that boundary."""
    spacing: Spacing = Spacing()
    journal_from: int = 0
    """Batch of the first row that the journal keeps: durable storage has the earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """Figures about what a worker does now."""

    job: str = ""
    generation: int = 0
    operations: int = 0
    """Operations done since the start of the generation."""
    runnable: bool = False
    """Whether an operation runs or could run."""
    batch: int = -1
    waiting_for: str = ""
    """The neighbour that it waits for; empty: none."""
    awaited_worker: int = -1
    """Position of that neighbour in the plan; -1: it waits for none."""
    broken_links: tuple[int, ...] = ()
    """Positions of the neighbours whose link is broken and not resumed yet."""
    cuts: tuple[LinkCuts, ...] = ()
    """Links of this generation that have been cut."""
    typical_s: float = 0.0
    """Median seconds of an operation of this generation; 0: none was done."""
    expected_s: float = 0.0
    """Mean seconds of the kind of operation that runs now; 0: none of the kind was done."""
    steps: int = 0
    """Parts of updates that this process has done: an advancing update does not stand still."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Goodput: class to seconds since the worker began to serve the job."""
    num_replayed: int = 0
    """Batches computed again."""
    num_resumed: int = 0
    """Links that broke and went on."""
    layers: Mapping[str, LayerTime] = field(default_factory=dict)
    """Kind (embed, block, head) to what one layer of it takes, where measured."""
    peak_bytes: int = 0
    """Most that was allocated on a CUDA device since the plan began; 0: not known."""
    num_samples: int = 0
    """Microbatches that were timed in this generation."""
    replan_s: float = 0.0
    """What the last planned change took of this worker; 0: none yet."""
    speed: DeviceSpeed = field(default_factory=DeviceSpeed)
    """Of its device, as far as this process has measured it."""


class Actual(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Everything that a worker says of itself."""

    job: str = ""
    """Job that it serves; empty: none. All else is about this job."""
    prepared: int = 0
    """Newest generation for which it is ready."""
    generation: int = 0
    """Generation of its last start."""
    layers: tuple[str, ...] = ()
    """Layers that it computes in this generation."""
    has_journal: bool = False
    chosen: int | None = None
    """Boundary that it chose to stop at, as the lead of the first stage."""
    stop_at: int | None = None
    """Boundary at which it will stop, as it was told; None: at the job's last one."""
    boundary: int | None = None
    """Boundary at which it stands with its state live; None: it computes, or was cut off between two."""
    best_batch: int | None = None
    """If evaluations end the job at `boundary`: batch of the last one that lowered the held-out loss."""
    written: tuple[str, ...] = ()
    """Parts that it has written at this boundary."""
    spacing: Spacing = Spacing()
    journal_from: int = 0
    num_damaged: int = 0
    """Damaged files that it refused to load since it was prepared."""
    damaged_path: str = ""
    """The last one of them."""
    failures: Mapping[int, Failure] = {}
    """Why it cannot do its part, by generation, of those that are not older than its own."""
    dies_of: Failure | None = None
    """The error with which the process is about to end."""
    heartbeat: Heartbeat = Heartbeat()


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first message of a worker process."""

    protocol: int
    incarnation: str
    """A random id of this process."""
    pid: int
    link_port: int
    """Where neighbouring stages dial."""
    device_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchDone:
    """A batch that the last stage has finished, as in its journal."""

    batch: int
    loss: float
    tokens: int
    seconds: float
    eval_loss: float | None = None
    gradient_norm: float | None = None
    final_eval_loss: float | None = None


class Progress(msgspec.Struct, frozen=True, tag=True):
    """A batch that the last stage's worker has finished."""

    job: str
    generation: int
    batch: BatchDone


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A part of a boundary on this machine's disk."""

    layer: str
    path: str
    size_bytes: int
    checksum: str


class Wrote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Parts of a boundary are in files: of a goal's `write`, or of a periodic snapshot."""

    job: str
    generation: int
    timeline: int
    boundary: int
    files: tuple[WrittenFile, ...] = ()
    is_snapshot: bool = False


class SnapshotMissed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A periodic snapshot was not written, or so late that the next ones are further apart."""

    job: str
    generation: int
    boundary: int
    reason: str
    factor: int = 0
    written: bool = False
    """Whether its files are in place: it was late."""


class Question(msgspec.Struct, frozen=True, tag=True):
    """What were the last operations? It is answered at once, also in the middle of an operation."""

    number: int


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to a question."""

    number: int
    operations: bytes
    """A control_pb2.RecentOperations."""


ToWorker = Goal | Question
FromWorker = Hello | Actual | Progress | Wrote | SnapshotMissed | Answer


class Action(StrEnum):
    """What a worker does to come nearer to its goal. The values complete the sentence: it did not …"""

    END = "end"
    RELEASE = "let its job go"
    PREPARE = "prepare"
    START = "start"
    CHOOSE_STOP = "choose where to stop"
    STOP_AT = "take note of where to stop"
    WRITE = "write its layers"
    SPACE_SNAPSHOTS = "space its snapshots"
    TRIM_JOURNAL = "trim its journal"


ENDS_A_RUN: Final = frozenset({Action.END, Action.RELEASE, Action.START})
"""What cannot be done between two operations of a run. The others are."""


def next_action(goal: Goal, actual: Actual) -> Action | None:
    """Return what a worker is to do next; None: it is where it should be, or cannot get there."""
    if goal.ends:
        return Action.END
    if actual.job and goal.job != actual.job:
        return Action.RELEASE
    if goal.prepare is not None:
        generation = goal.prepare.plan.generation
        if generation > max(actual.prepared, actual.generation) and generation not in actual.failures:
            return Action.PREPARE
    start = goal.start
    if start is None or start.plan.generation in actual.failures or start.plan.generation < actual.generation:
        return None
    if start.plan.generation > actual.generation:
        is_ready = actual.prepared >= start.plan.generation and start.num_damaged >= actual.num_damaged
        return Action.START if is_ready else None
    return _next_of_a_run(goal, actual)


def _next_of_a_run(goal: Goal, actual: Actual) -> Action | None:
    if goal.chooses_stop and actual.chosen is None:
        return Action.CHOOSE_STOP
    if goal.stop_at is not None and actual.boundary is None and goal.stop_at != actual.stop_at:
        return Action.STOP_AT
    if actual.boundary is not None and actual.boundary == goal.stop_at and set(goal.write) - set(actual.written):
        return Action.WRITE
    if goal.spacing.factor > actual.spacing.factor:
        return Action.SPACE_SNAPSHOTS
    if actual.has_journal and goal.journal_from > actual.journal_from:
        return Action.TRIM_JOURNAL
    return None


def time_for(action: Action | None, goal: Goal) -> float | None:
    """Return the seconds in which a worker has to be done. None: as long as it takes.

    A stop takes as long as its batch; the coordinator watches that.
    """
    spec = goal.spec
    match action:
        case Action.RELEASE:
            return RELEASE_S
        case Action.PREPARE if spec is not None:
            return preparation_s(spec.train)
        case Action.START if spec is not None and goal.start is not None:
            return loading_s(spec, goal.start.layers)
        case Action.WRITE if spec is not None:
            return loading_s(spec, goal.write)
        case _:
            return None


def loading_s(spec: JobSpec, layers: Collection[str]) -> float:
    """Return the time for a worker to load or write the state of some layers, at the minimum rate."""
    return LOADING_S + transfer_s(sum(cost.loaded_bytes for cost in layer_costs(spec) if cost.name in layers))


@dataclass(frozen=True, slots=True, order=True)
class JobGeneration:
    """One plan of one job."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One device's worker process."""

    device_index: int
    incarnation: str = ""
    """Incarnation of the process; empty while none has said hello."""
    pid: int = 0
    address: str = ""
    """Address at which its neighbours in the plan dial it."""
    goal: Goal = field(default_factory=Goal)
    """The last one that this process was given."""
    actual: Actual = field(default_factory=Actual)
    """The last one that it told."""
    failures: Mapping[JobGeneration, Failure] = field(default_factory=dict)
    """Reasons why it could not do its part of a generation. They outlive the process."""
    has_died: bool = False
    """True if a process was there, and the next one is not there yet."""

    @property
    def is_up(self) -> bool:
        """Return whether a process is there to reach a goal."""
        return bool(self.incarnation)

    @property
    def job(self) -> str:
        """Return the job that it serves or is to serve; empty: none."""
        return self.goal.job or self.actual.job

    def is_prepared(self, run_key: JobGeneration) -> bool:
        """Return whether it is ready to start a generation."""
        return self.actual.job == run_key.job and self.actual.prepared == run_key.generation

    def has_started(self, run_key: JobGeneration) -> bool:
        """Return whether a generation is the one that it computes, or computed last."""
        return self.actual.job == run_key.job and self.actual.generation == run_key.generation

    def is_running(self, run_key: JobGeneration) -> bool:
        """Return whether it is up with a generation and has not failed in it."""
        return self.is_up and self.has_started(run_key) and run_key not in self.failures

    def told(self, actual: Actual) -> "WorkerStatus":
        """Return the status after it said where it is."""
        news = {}
        if actual.failures != self.actual.failures:  # what was forgotten is not learned again
            told = {JobGeneration(actual.job, generation): why for generation, why in actual.failures.items()}
            news = {run_key: why for run_key, why in told.items() if run_key not in self.failures}
        return replace(self, actual=actual, failures={**self.failures, **news})

    def failed(self, failure: Failure, *, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it could not do its part of one generation."""
        return replace(self, failures={**self.failures, run_key: failure})

    def died(self, failure: Failure) -> "WorkerStatus":
        """Return the status after its process ended: every generation that it served is lost here."""
        goal, actual = self.goal, self.actual
        wanted = [JobGeneration(goal.job, part.plan.generation) for part in (goal.prepare, goal.start) if part]
        served = [JobGeneration(actual.job, number) for number in (actual.prepared, actual.generation) if number]
        failures = {run_key: failure for run_key in (*wanted, *served) if run_key not in self.failures}
        return WorkerStatus(device_index=self.device_index, failures={**self.failures, **failures}, has_died=True)

    def attached(self, incarnation: str, *, pid: int, address: str) -> "WorkerStatus":
        """Return the status after a new process said hello; the earlier process's failures stay."""
        return WorkerStatus(
            device_index=self.device_index, incarnation=incarnation, pid=pid, address=address, failures=self.failures
        )

    def forgetting(self, is_over: frozenset[JobGeneration]) -> "WorkerStatus":
        """Return the status without the failures of generations that are over."""
        return replace(
            self, failures={run_key: why for run_key, why in self.failures.items() if run_key not in is_over}
        )
