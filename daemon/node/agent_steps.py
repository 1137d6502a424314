"""What a daemon can do next about the plans: one dataclass per step. Pure; agent.py carries them out."""

from dataclasses import dataclass
from enum import StrEnum

from headway.daemon.node.reach_target import Target
from headway.daemon.records import CheckpointFile, PlanRecord, StateRecord, WorkerRecord
from headway.daemon.storage.state_key import StateKey
from headway.daemon.supervision.worker_status import JobGeneration


@dataclass(frozen=True, slots=True)
class OpenData:
    """Have the job's token shards on this node."""

    device_index: int
    of: JobGeneration


@dataclass(frozen=True, slots=True)
class OrderPrepare:
    """Get a worker ready for its part of a plan."""

    device_index: int
    of: JobGeneration
    position: int
    """Of the worker in the plan."""
    plan: PlanRecord
    data_path: str
    """Empty except on the first stage."""


@dataclass(frozen=True, slots=True)
class ProveLink:
    """Dial a worker that one of ours will have a link with, before the plan comes into force."""

    of: JobGeneration
    position: int
    """Of this node's worker in the plan."""
    other: int
    """Of its neighbour."""
    target: Target
    """Where the neighbour listens."""


class SourceKind(StrEnum):
    """Where a worker takes a layer from."""

    LIVE = "live"
    INITIAL = "initial"
    FILE = "file"


@dataclass(frozen=True, slots=True)
class Source:
    """One layer's source; `path` is empty unless it is a file."""

    layer: str
    kind: SourceKind
    path: str = ""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another worker of the plan, with which one has a link: of the stage before or after, or of the same stage."""

    position: int
    address: str
    incarnation: str
    is_collective: bool = False


@dataclass(frozen=True, slots=True)
class Neighbours:
    """All that a worker has links with."""

    upstream: tuple[Neighbour, ...] = ()
    """The workers of the stage before that share a reduction group with it."""
    downstream: tuple[Neighbour, ...] = ()
    siblings: tuple[Neighbour, ...] = ()
    """The other replicas of its stage."""


@dataclass(frozen=True, slots=True)
class OrderStart:
    """Let a worker compute from the plan's boundary on."""

    device_index: int
    of: JobGeneration
    position: int
    plan: PlanRecord
    sources: tuple[Source, ...]
    neighbours: Neighbours
    takes_snapshots: bool = True
    """Not where another replica of the stage on this node does."""
    source_job: str = ""
    """Whose files the sources are; empty: the job's own."""


@dataclass(frozen=True, slots=True)
class OrderChooseStop:
    """Ask the worker that leads the first stage where to stop."""

    device_index: int
    of: JobGeneration


@dataclass(frozen=True, slots=True)
class AnswerStop:
    """Fill in the boundary that the worker of position 0 chose."""

    of: JobGeneration
    boundary: int


@dataclass(frozen=True, slots=True)
class OrderStopAt:
    """Tell a worker where to stop."""

    device_index: int
    of: JobGeneration
    boundary: int


@dataclass(frozen=True, slots=True)
class OrderWrite:
    """Have a worker that stands at a boundary write layers into the store."""

    device_index: int
    of: JobGeneration
    timeline: int
    boundary: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderSpaceSnapshots:
    """Have a worker take only every factor-th periodic snapshot: copies do not keep up."""

    device_index: int
    of: JobGeneration
    factor: int
    boundary: int
    """The newest boundary that was there when this was decided."""


@dataclass(frozen=True, slots=True)
class CopyToCheckpoint:
    """Copy a held file to the job's checkpoint folder."""

    key: StateKey


@dataclass(frozen=True, slots=True)
class FetchState:
    """Bring a file into the store that a worker is to load, from another node or from a checkpoint."""

    device_index: int
    of: JobGeneration
    key: StateKey
    holders: tuple[str, ...]
    """Nodes that have it."""
    checkpoint_url: str
    """The folder of the boundary, or empty."""
    expected: CheckpointFile
    """Its size and hash."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """One file that another node has and this one should have too."""

    layer: str
    holders: tuple[str, ...]
    """Nodes that have it, the one to ask first in front."""
    expected: CheckpointFile


@dataclass(frozen=True, slots=True)
class FetchCopies:
    """Bring copies of a stage's files of one boundary into the store, so that they survive their owner."""

    job: str
    generation: int
    timeline: int
    boundary: int
    stage_index: int
    files: tuple[CopyFile, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Of the files."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, file.layer) for file in self.files)


@dataclass(frozen=True, slots=True)
class OrderRelease:
    """Let a worker forget a job."""

    device_index: int
    job: str


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """Say in etcd how far a worker is."""

    of: JobGeneration
    position: int
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class RegisterState:
    """Say in etcd what this node holds of a boundary."""

    job: str
    timeline: int
    boundary: int
    record: StateRecord


@dataclass(frozen=True, slots=True)
class UnregisterState:
    """Say in etcd that this node holds nothing of a boundary any more, before its files go."""

    job: str
    timeline: int
    boundary: int


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Delete files of a boundary that nobody counts on."""

    job: str
    timeline: int
    boundary: int
    layers: tuple[str, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Of the files."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, layer) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A worker cannot do its part: something that should be there is not."""

    device_index: int
    of: JobGeneration
    reason: str


Step = (
    OpenData
    | OrderPrepare
    | ProveLink
    | OrderStart
    | OrderChooseStop
    | AnswerStop
    | OrderStopAt
    | OrderWrite
    | OrderSpaceSnapshots
    | CopyToCheckpoint
    | FetchState
    | FetchCopies
    | OrderRelease
    | RegisterWorker
    | RegisterState
    | UnregisterState
    | DeleteState
    | GiveUp
)
