"""The orders of a daemon to a worker: one dataclass per order. Pure; order_messages.py has the messages."""

from dataclasses import dataclass
from enum import StrEnum

from headway.daemon.records.records import PlanRecord
from headway.daemon.workers.status import JobGeneration


@dataclass(frozen=True, slots=True)
class OrderPrepare:
    """Prepare a worker for its part of a plan."""

    device_index: int
    run_key: JobGeneration
    position: int
    """Position of the worker in the plan."""
    plan: PlanRecord
    data_paths: tuple[str, ...]
    """Folder of each data source's token shards; empty except on the first stage."""


class SourceKind(StrEnum):
    """Kinds of sources from which a worker loads a layer."""

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
    """Another worker of the plan with a link: of the stage before or after, or of the worker's own stage."""

    position: int
    address: str
    incarnation: str
    is_collective: bool = False


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


@dataclass(frozen=True, slots=True)
class OrderStart:
    """Start a worker's computation at the plan's boundary."""

    device_index: int
    run_key: JobGeneration
    position: int
    plan: PlanRecord
    sources: tuple[Source, ...]
    neighbours: Neighbours
    takes_snapshots: bool = True
    """False if another replica of the stage on this node takes the snapshots."""
    source_job: str = ""
    """Job that wrote the sources' files; empty: the job itself."""


@dataclass(frozen=True, slots=True)
class OrderChooseStop:
    """Ask the worker that leads the first stage to choose the stop boundary."""

    device_index: int
    run_key: JobGeneration


@dataclass(frozen=True, slots=True)
class OrderStopAt:
    """Tell a worker its stop boundary."""

    device_index: int
    run_key: JobGeneration
    boundary: int


@dataclass(frozen=True, slots=True)
class OrderWrite:
    """Let a worker that stands at a boundary write layers into the store."""

    device_index: int
    run_key: JobGeneration
    timeline: int
    boundary: int
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OrderSpaceSnapshots:
    """Let a worker take only every factor-th periodic snapshot, because copies do not keep up."""

    device_index: int
    run_key: JobGeneration
    factor: int
    boundary: int
    """Newest boundary at the time of the decision."""


@dataclass(frozen=True, slots=True)
class OrderTrimJournal:
    """Let the worker that has the journal drop rows that the checkpoint's journal parts have."""

    device_index: int
    run_key: JobGeneration
    boundary: int
    """Rows of older batches are dropped."""


@dataclass(frozen=True, slots=True)
class OrderRelease:
    """Let a worker forget a job."""

    device_index: int
    job: str
