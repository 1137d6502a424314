"""The steps that a daemon can take about plans: one dataclass per step. Pure; agent.py carries them out."""

from dataclasses import dataclass

from headway.daemon.reach.reach_target import Target
from headway.daemon.records.records import StateRecord, WorkerRecord
from headway.daemon.storage.state_key import StateKey
from headway.daemon.workers.orders import (
    OrderChooseStop,
    OrderPrepare,
    OrderRelease,
    OrderSpaceSnapshots,
    OrderStart,
    OrderStopAt,
    OrderTrimJournal,
    OrderWrite,
)
from headway.daemon.workers.status import JobGeneration
from headway.stages.state.file_digest import FileDigest


@dataclass(frozen=True, slots=True)
class OpenData:
    """Open the job's token shards on this node."""

    device_index: int
    run_key: JobGeneration


@dataclass(frozen=True, slots=True)
class ProveLink:
    """Dial the future neighbour of one of our workers, before the plan takes effect."""

    run_key: JobGeneration
    position: int
    """Position of this node's worker in the plan."""
    other: int
    """Position of the neighbour in the plan."""
    target: Target
    """Address where the neighbour listens."""


@dataclass(frozen=True, slots=True)
class AnswerStop:
    """Fill in the boundary that the worker of position 0 chose."""

    run_key: JobGeneration
    boundary: int


@dataclass(frozen=True, slots=True)
class CopyToCheckpoint:
    """Copy a held file to the job's checkpoint folder."""

    key: StateKey


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetch a file that a worker will load into the store, from another node or from a checkpoint."""

    device_index: int
    run_key: JobGeneration
    key: StateKey
    holders: tuple[str, ...]
    """Nodes that have the file."""
    checkpoint_url: str
    """Folder of the boundary in durable storage; empty: there is no checkpoint of it."""
    expected: FileDigest
    """Size and hash of the file."""


@dataclass(frozen=True, slots=True)
class CopyFile:
    """One file that another node has and this one should have too."""

    layer: str
    holders: tuple[str, ...]
    """Nodes that have the file; the first one is asked first."""
    expected: FileDigest


@dataclass(frozen=True, slots=True)
class FetchCopies:
    """Fetch copies of a stage's files of one boundary, so that they survive the loss of their owner."""

    job: str
    generation: int
    timeline: int
    boundary: int
    stage_index: int
    files: tuple[CopyFile, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Keys of the files to fetch."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, file.layer) for file in self.files)


@dataclass(frozen=True, slots=True)
class RegisterWorker:
    """Record a worker's progress in etcd."""

    run_key: JobGeneration
    position: int
    record: WorkerRecord


@dataclass(frozen=True, slots=True)
class RegisterState:
    """Record in etcd which files of a boundary this node holds."""

    job: str
    timeline: int
    boundary: int
    record: StateRecord


@dataclass(frozen=True, slots=True)
class UnregisterState:
    """Record in etcd that this node no longer holds files of a boundary, before they are deleted."""

    job: str
    timeline: int
    boundary: int


@dataclass(frozen=True, slots=True)
class DeleteState:
    """Delete files of a boundary that no plan needs."""

    job: str
    timeline: int
    boundary: int
    layers: tuple[str, ...]

    @property
    def keys(self) -> tuple[StateKey, ...]:
        """Keys of the files to delete."""
        return tuple(StateKey(self.job, self.timeline, self.boundary, layer) for layer in self.layers)


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Give up a worker's part of a generation, because something that it needs is missing."""

    device_index: int
    run_key: JobGeneration
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
    | OrderTrimJournal
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
