"""A machine as a value: a daemon with its view and its files, and the worker of each device."""

from dataclasses import dataclass, field

from headway.daemon.cluster.lineage import Lineage
from headway.daemon.cluster.records import (
    Failure,
    NodeRecord,
)
from headway.daemon.decide.cluster_view import ClusterView


def steady_view() -> ClusterView:
    """A view whose etcd has been there for ever."""
    view = ClusterView()
    view.set_in_sight(True, now=-1000.0)
    return view


@dataclass
class Worker:
    """A worker process: what it was ordered, and how far it is."""

    incarnation: str
    job: str = ""
    prepared: int = 0
    started: int = 0
    layers: tuple[str, ...] = ()
    has_journal: bool = False
    position: int = -1
    """Position in the plan that it runs."""
    applied: int = 0
    """Batches whose update it has applied."""
    last: int = 0
    """It stops here."""
    chosen: int | None = None
    lineage: Lineage = field(default_factory=lambda: Lineage(timeline=0))
    """Content of its state: the batches that were trained into it."""
    written: list[int] = field(default_factory=list)
    """Boundaries of periodic snapshots that its daemon has not taken over yet."""
    failure: tuple[int, Failure] | None = None
    """(generation, why)"""
    failed_job: str = ""
    """Job of that generation; empty: any job's."""
    is_down: bool = False
    """The process is gone and no spare has taken over."""
    hangs: bool = False

    def has_failed(self, job: str, generation: int) -> bool:
        """Return whether it can do nothing more for this generation of a job, or an earlier one."""
        return self.failure is not None and self.failure[0] >= generation and self.failed_job in ("", job)

    @property
    def is_stopped(self) -> bool:
        return self.started > 0 and self.applied == self.last


HeldKey = tuple[str, int, int, str]
"""(job, timeline, boundary, layer)"""


@dataclass
class Node:
    """A machine with its daemon: a view, devices with workers, and files."""

    record: NodeRecord
    workers: list[Worker]
    view: ClusterView = field(default_factory=lambda: steady_view())
    seen: int = 0
    """Number of the store's changes that its view has seen."""
    held: dict[HeldKey, Lineage] = field(default_factory=dict)
    """Files, and what was trained into each."""
    durable: set[HeldKey] = field(default_factory=set)
    proven: set[tuple[str, int, int, int, str]] = field(default_factory=set)
    """(job, generation, position, neighbour's position and process) of the links that its daemon has dialled."""
    out_of_reach: set[str] = field(default_factory=set)
    """Nodes whose workers it has dialled in vain."""
    lacks: set[str] = field(default_factory=set)
    """File systems of `data` and `checkpoint` that do not answer it."""
    is_alive: bool = True
    is_frozen: bool = False
    """Neither acts nor hears, but its lease still runs."""

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def lease(self) -> str:
        return self.record.incarnation
