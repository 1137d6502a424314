"""The records of nodes and jobs in etcd: one dataclass per key. keys.py has the keys' names, format.py the bytes, and
cluster_records.py what belongs to the cluster as a whole.

Every decision is one of these records, and every coordinator reads its whole knowledge from them. Times are seconds
since the epoch by the writer's clock, for people only: no decision compares two clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import ClassVar, Final

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.cluster.lineage import MOST_HOLDERS, MOST_STAGES, JournalPart, Lineage, PlanOutline, StageOutline
from headway.daemon.cluster.measurements import DeviceShortage, LinkCuts, MemoryShortage
from headway.daemon.jobs.job import JobSpec
from headway.stages.links.codec import Codec
from headway.stages.state.file_digest import FileDigest

IDENTITY: Final = "identity"
"""Name of the ailment that another daemon has this node's certificate."""


def job_ailment(job: str) -> str:
    """Name the ailment: a leader cannot decide about a job."""
    return f"job {job}"


def data_ailment(job: str) -> str:
    """Name the ailment: a node cannot read a job's data."""
    return f"data of {job}"


def checkpoint_ailment(job: str) -> str:
    """Name the ailment: a node cannot read the checkpoint that a job starts from."""
    return f"checkpoint of {job}"


def newer_ailment(job: str) -> str:
    """Name the ailment: a newer release submitted a job, with settings that a node does not know."""
    return f"newer job {job}"


ANY_NEWER = "newer jobs"
"""The same of so many jobs that a node names none: it takes part in no job's plan."""


VANISHED = "lost job "
"""Begins the name of the ailment: etcd has lost a job, and nobody removed it."""


PROTOCOL_VERSION = 14

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
    """All of its memory; 0: not known, not limited."""
    speed: float = 1.0
    """Relative speed; estimated seconds of a layer are divided by it. Measured in float32."""
    arithmetic_class: str = ""
    """Like NodeRecord's, of this device alone. Empty: the node does not say, and its own class counts."""
    capability: str = ""
    """Compute capability of a CUDA device, such as `9.0`; empty: a CPU, or the node does not say."""
    flash3: str = ""
    """Build of FlashAttention 3 that a card has; empty: none."""
    num_sharers: int = 1
    """Number of nodes that share the card; `memory_bytes` is this node's part of it."""
    bfloat16_speed: float = 0.0
    """Like `speed`, measured in bfloat16; 0: not measured, and `speed` counts."""
    reserve_bytes: int = 0
    """Part of its memory that no plan fills: the context, libraries' work space, and the allocator's fragments."""
    memory_gb_s: float = 0.0
    """10⁹ bytes a second of its memory, read or written; 0: not known, and a part of the speeds."""
    num_cores: float = 0.0
    """Cores of a CPU's machine, or what a container leaves of them; in a plan, this device's part. 0: not known."""

    @property
    def usable_bytes(self) -> int:
        """Return the memory that a plan may fill; 0: not known, not limited."""
        return max(self.memory_bytes - self.reserve_bytes, 1) if self.memory_bytes else 0

    @property
    def unmeasured(self) -> "Device":
        """Return the device without what times alone depend on."""
        return replace(self, speed=1.0, bfloat16_speed=0.0, memory_gb_s=0.0, num_cores=0.0)

    def speed_of(self, dtype: str) -> float:
        """Return the relative speed of products of a dtype."""
        return self.bfloat16_speed or self.speed if dtype == "bfloat16" else self.speed


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPort:
    """The port where the worker of one device listens for other workers."""

    device_index: int
    address: str
    incarnation: str
    """Incarnation of the worker's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """`nodes/<node>`, leased: a machine's daemon."""

    name: str
    incarnation: str
    address: str
    """Address of the Node service as host:port."""
    host: str
    """Host where its workers listen."""
    site: str
    devices: tuple[Device, ...]
    memory_bytes: int
    """Room for boundary states: its memory, or less where the folder of layer files has less."""
    arithmetic_class: str
    """Versions of torch and Headway, and device model or CPU capability; of unlike devices, joined. Equal ones give
    equal bits."""
    protocol: int = PROTOCOL_VERSION
    is_draining: bool = False
    down_devices: tuple[int, ...] = ()
    """Devices whose worker process died and whose next process has not started. Plans leave them out."""
    site_is_private: bool = False
    """True if the site's network is private, as in NodeConfig: workers on its machines may then have plain links."""
    worker_ports: str = ""
    """Ports at which its workers can be reached, as in NodeConfig; empty: any port."""
    worker_trouble: str = ""
    """Reason why a worker process does not start; empty: each has started."""
    generations: dict[str, int] = field(default_factory=dict)
    """Highest generation seen: by name, of all jobs of that name; by `seen_key`, of one submission.

    Only those above the generations in etcd's own records, so it is empty unless etcd's history went back.
    """
    started_at: float = 0.0
    workers: tuple[WorkerPort, ...] = ()
    """The running workers of its devices."""
    stays_out: str = ""
    """Reason why new plans leave this node out at its own request; a plan in force continues. Empty: they may
    use it.
    """
    ailments: dict[str, str] = field(default_factory=dict)
    """Present faults of this daemon: activity, or condition, to sentence."""
    has_authority: bool = False
    """True if it signs certificates with the cluster's authority, behind its one port."""
    authority: str = ""
    """Fingerprint of that authority's certificate: others ask for another certificate when it is a new one."""
    layer_folder: str = ""
    """Folder of its layer files, if that has less room than its memory; empty: the memory is the limit."""
    allow_plugins: tuple[str, ...] = ()
    """Wheels whose code it runs, as in NodeConfig."""

    @property
    def endpoint(self) -> NodeEndpoint:
        """Return its daemon's address, for dialling."""
        return NodeEndpoint(self.name, self.address)

    @property
    def relay(self) -> str:
        """Return the port of another at which it stands by, the first one that others dial; empty: they dial it."""
        ports, way, _ = self.address.partition("/")
        return ports.split(",")[0] if way else ""

    def storage_trouble(self, job: str) -> str:
        """Return why it cannot read a job, or the data or the checkpoint that the job starts from; empty: it can."""
        ailments = (newer_ailment(job), ANY_NEWER, data_ailment(job), checkpoint_ailment(job))
        return next(filter(None, (self.ailments.get(ailment, "") for ailment in ailments)), "")

    def generation_seen(self, job: str, uid: str) -> int:
        """Return the generation seen of one submission. A node that counts by name alone may mean it."""
        counts_by_name = not any(key.startswith(seen_key(job, "")) for key in self.generations)
        return self.generations.get(seen_key(job, uid), self.generations.get(job, 0) if counts_by_name else 0)


def seen_key(job: str, uid: str) -> str:
    """Return the key under which a submission's generations are remembered: a later job of its name has another."""
    return f"{job}/{uid}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecRecord:
    """`jobs/<job>/spec`, immutable. First in, first out follows the key's create revision."""

    WHOLE: ClassVar[str] = "spec"  # as format.py says
    spec: JobSpec
    uid: str = ""
    """Random id of this submission: a later job of this name shares no folder with it."""
    parent: str = ""
    """Job and boundary of the checkpoint from which this job started; empty: it started with its own weights."""
    submitted_at: float = 0.0
    submitted_by: str = ""
    """`user@host`"""

    @property
    def user(self) -> str:
        """Return the user whose share the job uses; the host of the submission does not matter."""
        return self.submitted_by.partition("@")[0]


class Desired(StrEnum):
    """The state that people want for a job."""

    RUNNING = "running"
    PAUSED = "paused"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredRecord:
    """`jobs/<job>/desired`"""

    state: Desired = Desired.RUNNING
    request: int = 0
    """Number that rises with every request, so that a new `resume` of a failed job differs from the previous one."""


class Phase(StrEnum):
    """The phase of a job. The table of coordinator.py has its transitions."""

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
    """The number of a job's failures without progress, for its failure budget."""

    boundary: int = -1
    """Newest boundary that a failure could go back to on this timeline; a newer one restarts the count."""
    timeline: int = 0
    """Timeline of the plan that failed last; 0: none has."""
    num_deaths: int = 0
    """Incidents since that boundary was new, in which workers died by themselves or did not answer."""
    batch: int = -1
    """Batch of the last failure."""
    num_same_batch: int = 0
    """Failures in a row at that batch."""
    faults: tuple[tuple[str, str], ...] = ()
    """(fault, node) of the errors that workers reported since that boundary was new, once for each incident."""
    cause: str = ""
    """Why it failed last, as a sentence without its full stop; empty: an older leader counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRecord:
    """`jobs/<job>/phase`: the phase of the job, and the reason."""

    phase: Phase = Phase.QUEUED
    reason: str = ""
    """One sentence for people."""
    error: str = ""
    """Traceback of a failed worker, and the last lines of its output."""
    generation: int = 0
    """Highest generation handed out."""
    request: int = 0
    """`desired` request that this phase has answered."""
    num_events: int = 0
    lineage: Lineage | None = None
    """Lineage of a dissolved plan that ran beyond the newest checkpoint. Nodes keep its newest boundaries, and the next
    start rolls back to the best of them on a new timeline. None: the checkpoint has everything.
    """
    failures: FailureCount = field(default_factory=FailureCount)
    furthest: int = 0
    """First batch that was not begun under the dissolved plan, as in PlanRecord."""
    arithmetic_classes: tuple[str, ...] = ()
    """Arithmetic classes of the plan of `lineage`, as in PlanRecord."""
    was_rounded: bool = False
    """True if the plan of `lineage` or an earlier one had a coded cut, as in PlanRecord."""
    outlook: str = ""
    """Reason why a clearly faster plan is not taken; empty: there is none."""
    planning_since: float = 0.0
    """Time since which the job waits for a plan to be computed, if the wait is long; 0: it does not wait."""
    since: float = 0.0
    shortages: tuple[DeviceShortage, ...] = ()
    """What plans respect since workers of the job ran out of memory, until a user resumes it."""
    unsaved: int = -1
    """Boundary whose checkpoint the folder refused, as an event has told; -1: none since the newest checkpoint."""
    spent_s: dict[str, float] = field(default_factory=dict)
    """Seconds by class that workers spent under plans before the one in force, also those of nodes that are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPart:
    """One worker's part of a plan: which device computes which layers, for which of a batch's reduction groups.

    Workers with equal layers are the replicas of one stage. They are next to each other in the plan, sorted by their
    first group, and the first of them leads. A worker is known by its position among all workers of the plan.
    """

    node: str
    node_incarnation: str
    device_index: int
    layers: tuple[str, ...]
    depth: int
    groups: tuple[int, ...] = ()
    """Reduction groups whose microbatches it computes, rising; empty: all, because it is the stage's only worker."""
    device_bytes: int = field(default=0, compare=False)
    """Predicted memory on the device, before any measurement; 0: an older leader planned it."""
    recompute: str = ""
    """The plan's choice of what the stage's backward computes again; empty: the job itself says it."""
    shares_update: bool = False
    """Whether each of the stage's replicas orthogonalises a share of its matrices; older plans do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """`jobs/<job>/plan` (in force) and `jobs/<job>/next` (being prepared)."""

    FORMAT: ClassVar[int] = 2
    """See format.py; 2: a plan lists `workers`."""
    generation: int
    timeline: int
    ancestry: tuple[tuple[int, int], ...] = ()
    """(timeline, boundary up to which it counts), oldest first, without the present one."""
    boundary: int = 0
    """The first batch of this plan; meaningless in `next` until it comes into force."""
    source: str = "initial"
    """Source of the boundary's state: `initial`, `nodes` (holders and live buffers) or `checkpoint`."""
    source_timeline: int = 0
    """Timeline whose files of the boundary are loaded: the present one or, after a rollback, an older one."""
    furthest: int = 0
    """First batch that was not begun before this plan: computing an earlier one is replay."""
    workers: tuple[WorkerPart, ...] = ()
    predicted_batch_seconds: float = 0.0
    promised: float = 0.0
    """Predicted speed-up over the earlier plan; 0: the change was forced, at any speed."""
    reason: str = ""
    is_exact: bool = True
    exact_reason: str = ""
    arithmetic_classes: tuple[str, ...] = ()
    """Every class that this job's workers have had since boundary 0, with this plan's."""
    codecs: tuple[str, ...] = ()
    """Codec of the hidden states, for each cut between two stages: `none`, `bf16`, `int8`; empty: none on all cuts."""
    was_rounded: bool = False
    """True if this plan, or any earlier one since boundary 0, has a coded cut."""

    @property
    def lineage(self) -> Lineage:
        """Return its timeline with its ancestry."""
        return Lineage(timeline=self.timeline, ancestry=self.ancestry)

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Return, per stage, the positions of its workers; the first one leads."""
        return replicas_of(self.workers)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of the pipeline; each may have several workers."""
        return len(self.replicas)

    def codec(self, stage: int) -> Codec:
        """Return the codec of the cut above a stage; none above the first, and below the last."""
        return Codec[self.codecs[stage - 1].upper()] if 0 < stage <= len(self.codecs) else Codec.NONE

    @property
    def coded_cuts(self) -> tuple[str, ...]:
        """Return the first layer of each stage whose links to the previous stage are coded."""
        return tuple(
            self.workers[workers[0]].layers[0] for stage, workers in enumerate(self.replicas) if self.codec(stage)
        )

    def stage_index(self, position: int) -> int:
        """Return the stage of a worker, from 0."""
        return next(index for index, workers in enumerate(self.replicas) if position in workers)

    def outline(self, layers: Sequence[str]) -> PlanOutline:
        """Return what stays known of it; layers: the model's, in order."""
        of = {name: index for index, name in enumerate(layers)}
        stages = [[self.workers[position] for position in positions] for positions in self.replicas]
        most = max(MOST_HOLDERS // len(stages), 1)
        outlined = tuple(
            StageOutline(
                of[workers[0].layers[0]],
                of[workers[0].layers[-1]],
                tuple((worker.node, worker.device_index) for worker in workers[:most]),
                max(len(workers) - most, 0),
            )
            for workers in stages
        )
        return PlanOutline(
            timeline=self.timeline,
            boundary=self.boundary,
            furthest=self.furthest,
            predicted_batch_seconds=self.predicted_batch_seconds,
            stages=outlined if len(outlined) <= MOST_STAGES else (),
        )

    def is_lead(self, position: int) -> bool:
        """Return whether a worker leads its stage: it has group 0, and reports for the stage."""
        return not self.workers[position].groups or self.workers[position].groups[0] == 0

    def has_journal(self, position: int) -> bool:
        """Return whether a worker writes the journal: it leads the last stage."""
        return position == self.replicas[-1][0]

    def holder(self, layer: str) -> WorkerPart:
        """Return the worker that computes a layer, the lead of several. Raises KeyError for a layer that no
        stage has.
        """
        for stage in self.workers:
            if layer in stage.layers:
                return stage
        raise KeyError(layer)

    def holders(self, layer: str) -> tuple[WorkerPart, ...]:
        """Return all workers that compute a layer, the lead first."""
        return tuple(stage for stage in self.workers if layer in stage.layers)


def replicas_of(workers: Sequence[WorkerPart]) -> tuple[tuple[int, ...], ...]:
    """Return the positions of a plan's workers by stage: neighbours with equal layers are replicas of one stage."""
    found: list[list[int]] = []
    for position, worker in enumerate(workers):
        if position and worker.layers == workers[position - 1].layers:
            found[-1].append(position)
        else:
            found.append([position])
    return tuple(map(tuple, found))


class Save(StrEnum):
    """The layers that are written when the workers have reached the stop boundary."""

    MOVES = "moves"  # layers that change hands between `plan` and `next`
    CHECKPOINT = "checkpoint"  # all layers, to durable storage


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRecord:
    """`jobs/<job>/stop`: the coordinator asks, the first stage's daemon fills in the boundary."""

    generation: int
    save: Save
    boundary: int | None = None


class WorkerState(StrEnum):
    """The progress of a worker in its generation."""

    READY = "ready"  # process up, model imported, data open, address known
    RUNNING = "running"
    STOPPED = "stopped"  # at `boundary`, state live
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a worker could not do its part of a generation."""

    text: str = ""
    batch: int = -1
    """Batch in which it failed, if its daemon knows; -1: unknown."""
    fault: str = ""
    """One line that is equal for workers with equal errors; empty when it was killed or lost a neighbour."""
    is_hopeless: bool = False
    """True if another attempt would end in this error again: a loss that is not finite, a package that is missing."""
    refuses_plugins: bool = False
    """True if its machine cannot import the job's code: its node's record says so, and plans leave the node out."""
    lost_peer: int = -1
    """Position of the neighbour whose link is lost, if it failed for that reason; -1: it did not."""
    was_unreached: bool = False
    """True if that neighbour was dialled and never answered: the link never opened."""
    was_moved: bool = False
    """True if its daemon ended it because the machine lost its address. This counts against no node."""
    shortage: MemoryShortage | None = None
    """The refused allocation, if it failed because its device had no memory left."""
    damaged: str = ""
    """Folder of the checkpoint in which its node found a damaged file; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """`jobs/<job>/workers/<generation>/<position>`, leased by its node."""

    FORMAT: ClassVar[int] = 2
    """See format.py; 2: a worker has a `failure`."""
    node: str
    incarnation: str
    """Incarnation of the worker's process."""
    address: str
    pid: int
    state: WorkerState
    boundary: int | None = None
    best_batch: int | None = None
    """Batch of the last evaluation that lowered the held-out loss, if the job ends early at `boundary`."""
    failure: Failure = Failure()
    """Why it failed, if it did."""
    proven: dict[int, str] = field(default_factory=dict)
    """Position of each neighbour that this node has dialled for this plan to the process that answered, once it reaches
    all of them.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFile(FileDigest):
    """One layer's file, as a node holds it."""

    is_durable: bool = False
    """True if the file is also copied to the checkpoint folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """`jobs/<job>/state/<timeline>/<boundary>/<node>`, leased by its node: the files of a boundary that it holds."""

    incarnation: str
    """Incarnation of the node. Its files end with it, and its record may outlive it by a lease time."""
    generation: int
    """Generation of the plan under which it was written."""
    files: dict[str, StateFile] = field(default_factory=dict)
    """Files by layer; `journal` is one of them."""
    trouble: str = ""
    """Reason why a file could not be copied to the checkpoint folder."""
    lacks_access: bool = False
    """True if the node has no credentials or no package for the checkpoint folder: others copy its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    """`jobs/<job>/checkpoint`: the newest checkpoint whose manifest was written."""

    timeline: int
    boundary: int
    url: str
    files: dict[str, FileDigest] = field(default_factory=dict)
    """Files by layer; `journal` is one of them."""
    ancestry: tuple[tuple[int, int], ...] = ()
    """Earlier timelines of the run, as in PlanRecord."""
    arithmetic_classes: tuple[str, ...] = ()
    """Arithmetic classes of the job's workers since boundary 0, as in PlanRecord."""
    was_rounded: bool = False
    """True if any plan since boundary 0 had a coded cut, as in PlanRecord."""
    origin_job: str = ""
    """The job that wrote the checkpoint, if it is another job: the parent."""
    earlier: tuple[str, ...] = ()
    """Folders of older checkpoints that are kept, newest first."""
    dropped: tuple[str, ...] = ()
    """Folders of checkpoints that are to be deleted."""
    journal_parts: tuple[JournalPart, ...] = ()
    """The journal's rows up to the last part's boundary, oldest first. Empty: `journal` has all rows."""
    written_at: float = field(default=0.0, compare=False)
    """When its manifest was due; 0: an older leader wrote it, or another job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """`jobs/<job>/events/<number>`: a sentence."""

    at: float
    text: str
    generation: int
    is_failure: bool = False
    """True if a failure interrupted the training; it goes on with the next event that has a plan."""
    plan: PlanOutline | None = None
    """The plan that came into force; None: none did, or an earlier release wrote the event."""
    goodput_s: dict[str, float] = field(default_factory=dict)
    """Seconds by class that the job's workers had spent by then: `JobView.told_s`."""
    batch: int = -1
    """Newest batch whose loss was known; -1: none of the plan in force."""
    cuts: tuple[LinkCuts, ...] = ()
    """Links that were cut or went on, with the seconds since the event before that tells of them."""
