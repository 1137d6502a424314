"""What lies in etcd: one dataclass per key. record_keys.py has the keys' names, record_format.py the bytes.

Every decision is one of these records, and every coordinator reads its whole knowledge from them. Times are seconds
since the epoch by the writer's clock, for people only: no decision compares two clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.ailments import checkpoint_ailment, data_ailment
from headway.daemon.jobs.job import JobSpec
from headway.daemon.lineage import Lineage
from headway.stages.codec import Codec

PROTOCOL_VERSION = 4

DeviceKey = tuple[str, int]
"""(node, device)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One place where one worker can run."""

    kind: str
    """`cpu` or `cuda`."""
    index: int = 0
    model: str = ""
    memory_bytes: int = 0
    speed: float = 1.0
    """Relative; estimated seconds of a layer are divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPort:
    """Where the worker of one device listens for other workers."""

    device_index: int
    address: str
    incarnation: str
    """Of the worker's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """`nodes/<node>`, leased: a machine's daemon."""

    name: str
    incarnation: str
    address: str
    """host:port of the Node service."""
    host: str
    """Where its workers listen."""
    site: str
    devices: tuple[Device, ...]
    memory_bytes: int
    arithmetic_class: str
    """torch version, Headway version, device model or CPU capability: equal classes give equal bits."""
    protocol: int = PROTOCOL_VERSION
    is_draining: bool = False
    down_devices: tuple[int, ...] = ()
    """Devices whose worker process is not there: it died, and the next one still starts. Plans leave them out."""
    site_is_private: bool = False
    """As in NodeConfig: between machines of such a site workers may have plain links."""
    worker_ports: str = ""
    """As in NodeConfig: outside of these, nobody reaches its workers."""
    worker_trouble: str = ""
    """Why a worker process does not start; empty: each has."""
    generations: dict[str, int] = field(default_factory=dict)
    """Highest generation this node has seen: by name, of all jobs that had it; by `seen_key`, of one submission."""
    started_at: float = 0.0
    workers: tuple[WorkerPort, ...] = ()
    """Of the devices whose worker process is there."""
    stays_out: str = ""
    """Why new plans leave this node out, by its own wish; a plan in force goes on. Empty: they may use it."""
    ailments: dict[str, str] = field(default_factory=dict)
    """What of this daemon does not work just now: activity, or condition, to sentence."""

    @property
    def endpoint(self) -> NodeEndpoint:
        """Its daemon, for those that dial it."""
        return NodeEndpoint(self.name, self.address)

    def storage_trouble(self, job: str) -> str:
        """Why it cannot read the data or the checkpoint that a job starts from; empty: it can."""
        told = (self.ailments.get(ailment, "") for ailment in (data_ailment(job), checkpoint_ailment(job)))
        return next(filter(None, told), "")

    def generation_seen(self, job: str, uid: str) -> int:
        """Of one submission. A node that counts by name alone may mean it."""
        counts_by_name = not any(key.startswith(seen_key(job, "")) for key in self.generations)
        return self.generations.get(seen_key(job, uid), self.generations.get(job, 0) if counts_by_name else 0)


def seen_key(job: str, uid: str) -> str:
    """What generations of a submission are remembered by: a job of the same name after it is another."""
    return f"{job}/{uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """`leader`, leased: who coordinates."""

    node: str
    incarnation: str
    quarantine_after: int = 3
    """Failures of a node after which its plans leave the node out; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRecord:
    """`jobs/<job>/spec`, immutable. First in, first out goes by the key's create revision."""

    spec: JobSpec
    uid: str = ""
    """A random id of this submission: a job of the same name after it shares no folder with it."""
    parent: str = ""
    """The job, and the boundary, from whose checkpoint this one began; empty: it began with its own weights."""
    submitted_at: float = 0.0
    submitted_by: str = ""
    """`user@host`"""

    @property
    def user(self) -> str:
        """Whose share of the cluster the job is counted against, from whatever host it was submitted."""
        return self.submitted_by.partition("@")[0]


class Desired(StrEnum):
    """What people want of a job."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredRecord:
    """`jobs/<job>/desired`"""

    state: Desired = Desired.RUNNING
    request: int = 0
    """Rises with every request, so that `resume` of a failed job can be told from an old wish."""


class Phase(StrEnum):
    """Where a job stands. The table of coordinator.py says how it moves."""

    QUEUED = "queued"
    PREPARING = "preparing"
    RUNNING = "running"
    CHANGING = "changing"
    STOPPING = "stopping"
    RECOVERING = "recovering"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


TERMINAL_PHASES = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureCount:
    """How often a job has failed without getting further, for its failure budget."""

    boundary: int = -1
    """The newest to go back to that a failure has found on this timeline; a newer one starts the count anew."""
    timeline: int = 0
    """Of the plan that failed last; 0: none has."""
    num_deaths: int = 0
    """Incidents since that boundary was new, in which workers died by themselves or did not answer."""
    batch: int = -1
    """The batch of the last failure."""
    num_same_batch: int = 0
    """Failures in a row at that batch."""
    faults: tuple[tuple[str, str], ...] = ()
    """(fault, node) of the errors that workers told of since that boundary was new."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """`jobs/<job>/phase`: where the job stands, and why."""

    phase: Phase = Phase.QUEUED
    reason: str = ""
    """One sentence for people."""
    error: str = ""
    """A failed worker's traceback and the last lines of its output."""
    generation: int = 0
    """Highest generation handed out."""
    request: int = 0
    """The `desired` request that this phase has answered."""
    num_events: int = 0
    lineage: Lineage | None = None
    """Of a plan that ran beyond the newest checkpoint and was dissolved: nodes keep its newest boundaries, and the next
    start rolls back to the best of them on a new timeline. None: the checkpoint has everything."""
    failures: FailureCount = field(default_factory=FailureCount)
    furthest: int = 0
    """As in PlanRecord, of the plan that was dissolved."""
    arithmetic_classes: tuple[str, ...] = ()
    """As in PlanRecord, of the plan that `lineage` belongs to."""
    was_rounded: bool = False
    """The same."""
    outlook: str = ""
    """Why a plan that is clearly faster than the one in force is not taken; empty: there is none."""
    planning_since: float = 0.0
    """Since when the job has waited for a plan to be computed, if it does so for long; 0: it does not."""
    since: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One worker's part of a plan: which device computes which layers, for which of a batch's reduction groups.

    Workers with the same layers are the replicas of one stage: they stand side by side in the plan, sorted by their
    first group, and the first of them leads. A worker is known by its position among all workers of the plan.
    """

    node: str
    node_incarnation: str
    device_index: int
    layers: tuple[str, ...]
    depth: int
    groups: tuple[int, ...] = ()
    """The reduction groups whose microbatches it computes, rising; empty: all, it has the stage to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """`jobs/<job>/plan` (in force) and `jobs/<job>/next` (being prepared)."""

    generation: int
    timeline: int
    ancestry: tuple[tuple[int, int], ...] = ()
    """(timeline, boundary up to which it counts), oldest first, without the present one."""
    boundary: int = 0
    """The first batch of this plan; meaningless in `next` until it comes into force."""
    source: str = "initial"
    """Where boundary state comes from: `initial`, `nodes` (holders and live buffers) or `checkpoint`."""
    source_timeline: int = 0
    """The timeline whose files of the boundary are loaded: the present one, or after a rollback an older one."""
    furthest: int = 0
    """Batches below were begun before this plan: computing them again is replay."""
    stages: tuple[StagePlan, ...] = ()
    predicted_batch_seconds: float = 0.0
    promised: float = 0.0
    """How many times faster than the plan before it was predicted to be; 0: it had to be, whatever it is."""
    reason: str = ""
    is_exact: bool = True
    exact_reason: str = ""
    arithmetic_classes: tuple[str, ...] = ()
    """Every class that this job's workers have had since boundary 0, this plan's included."""
    codecs: tuple[str, ...] = ()
    """Of each cut between two stages, how its links code hidden states: `none`, `bf16`, `int8`; empty: nowhere."""
    was_rounded: bool = False
    """Whether this plan, or any before it since boundary 0, has a cut that is coded."""

    @property
    def lineage(self) -> Lineage:
        """Its timeline with its ancestry."""
        return Lineage(timeline=self.timeline, ancestry=self.ancestry)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the positions of its workers; the first one leads."""
        return replicas_of(self.stages)

    @property
    def num_stages(self) -> int:
        """Of the pipeline; each may have several workers."""
        return len(self.replicas)

    def codec(self, stage: int) -> Codec:
        """Of the cut above a stage; none above the first, and below the last."""
        return Codec[self.codecs[stage - 1].upper()] if 0 < stage <= len(self.codecs) else Codec.NONE

    @property
    def coded_cuts(self) -> tuple[str, ...]:
        """The first layers of the stages whose links with the stage before are coded."""
        return tuple(
            self.stages[workers[0]].layers[0] for stage, workers in enumerate(self.replicas) if self.codec(stage)
        )

    def stage_index(self, position: int) -> int:
        """The stage that a worker belongs to, from 0."""
        return next(index for index, workers in enumerate(self.replicas) if position in workers)

    def is_lead(self, position: int) -> bool:
        """Whether a worker leads its stage: it has group 0, and speaks for the stage."""
        return not self.stages[position].groups or self.stages[position].groups[0] == 0

    def has_journal(self, position: int) -> bool:
        """Whether a worker writes the journal: it leads the last stage."""
        return position == self.replicas[-1][0]

    def holder(self, layer: str) -> StagePlan:
        """The worker that computes a layer, the leading one of several. Raises KeyError for a layer no stage has."""
        for stage in self.stages:
            if layer in stage.layers:
                return stage
        raise KeyError(layer)

    def holders(self, layer: str) -> tuple[StagePlan, ...]:
        """All workers that compute a layer, the leading one first."""
        return tuple(stage for stage in self.stages if layer in stage.layers)


def replicas_of(workers: Sequence[StagePlan]) -> tuple[tuple[int, ...], ...]:
    """The positions of a plan's workers by stage: those side by side with the same layers are replicas of one."""
    found: list[list[int]] = []
    for position, worker in enumerate(workers):
        if position and worker.layers == workers[position - 1].layers:
            found[-1].append(position)
        else:
            found.append([position])
    return tuple(map(tuple, found))


class Save(StrEnum):
    """Which layers are written when the workers have reached the stop boundary."""

    MOVES = "moves"  # those that change hands between `plan` and `next`
    CHECKPOINT = "checkpoint"  # all of them, to durable storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """`jobs/<job>/stop`: the coordinator asks, the first stage's daemon fills in the boundary."""

    generation: int
    save: Save
    boundary: int | None = None


class WorkerState(StrEnum):
    """How far a worker is in its generation."""

    READY = "ready"  # process up, model imported, data open, address known
    RUNNING = "running"
    STOPPED = "stopped"  # at `boundary`, state live
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """`jobs/<job>/workers/<generation>/<position>`, leased by its node."""

    node: str
    incarnation: str
    """Of the worker's process."""
    address: str
    pid: int
    state: WorkerState
    boundary: int | None = None
    error: str = ""
    batch: int = -1
    """Where it failed, as far as its daemon knows; -1: not known."""
    fault: str = ""
    """One line that two workers with the same error share; empty when it was killed or lost a neighbour."""
    is_hopeless: bool = False
    """Trying again would end in the same error: a loss that is not finite."""
    lost_peer: int = -1
    """Position of the neighbour whose link is lost, if that is why it failed; -1: it is not."""
    was_unreached: bool = False
    """That neighbour was dialled and never answered: the link never opened."""
    was_moved: bool = False
    """Its daemon ended it because the machine has lost its address: nobody is to blame."""
    proven: tuple[int, ...] | None = None
    """Positions of the neighbours that this node has dialled for this plan, once it reaches all of them. None: a daemon
    of an earlier version, which does not dial beforehand."""
    proven_workers: tuple[str, ...] = ()
    """The processes that answered, one for each of `proven`. Empty: an earlier version, which does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile:
    """One layer's file, as a node holds it."""

    size_bytes: int
    checksum: str
    is_durable: bool = False
    """Also copied to the checkpoint folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """`jobs/<job>/state/<timeline>/<boundary>/<node>`, leased by its node: what it holds of a boundary."""

    incarnation: str
    """Of the node: files die with it, and its record may outlive it by a lease."""
    generation: int
    """Of the plan under which it was written."""
    files: dict[str, StateFile] = field(default_factory=dict)
    """By layer; `journal` is one of them."""
    trouble: str = ""
    """Why a file could not be copied to the checkpoint folder."""
    lacks_access: bool = False
    """The node has no credentials or no package for the checkpoint folder: others copy what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """One file of a checkpoint."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """`jobs/<job>/checkpoint`: the newest checkpoint that exists, that is, whose manifest was written."""

    timeline: int
    boundary: int
    url: str
    files: dict[str, CheckpointFile] = field(default_factory=dict)
    """By layer; `journal` is one of them."""
    ancestry: tuple[tuple[int, int], ...] = ()
    """As in PlanRecord."""
    arithmetic_classes: tuple[str, ...] = ()
    """As in PlanRecord."""
    was_rounded: bool = False
    """As in PlanRecord."""
    origin_job: str = ""
    """The job that wrote it, if it was another one: the parent."""
    earlier: tuple[str, ...] = ()
    """Folders of older checkpoints that are kept, newest first."""
    dropped: tuple[str, ...] = ()
    """Folders of checkpoints that are to be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailureRecord:
    """`failures/<node>/<number>`, under a lease of QUARANTINE_S: a node failed. Enough of them, and it is left out.

    etcd counts the time, so that no node's clock matters.
    """

    at: float
    text: str
    job: str = ""
    """The job in which it failed; empty: a record of before jobs were named."""
    is_jobs_error: bool = False
    """A worker told of an error that may be the job's: for other jobs, all such of one job count once."""
    incarnation: str = ""
    """Of the daemon that was lost; empty: it lives on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """`placement`: the last plan that was given devices.

    Every transaction that gives devices to a job compares and writes this key, so that two decisions from one stale
    view cannot both give the same device away.
    """

    job: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesRecord:
    """`shares`: how an administrator wants the cluster divided between users."""

    weights: dict[str, float] = field(default_factory=dict)
    """By user; a user who is not named has 1."""
    slice_s: float = 600.0
    """A job that was started is not stopped for another one before it has run for so long."""
    half_life_s: float = 7200.0
    """Use that lies so far back counts half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """`usage`: what each user has used of late, written by the leader once a minute while jobs have devices."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Device-seconds by user; older ones have decayed."""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """`jobs/<job>/events/<number>`: a sentence."""

    at: float
    text: str
    generation: int
