"""The daemon's knowledge of one of its workers: a value that reports and orders turn into the next one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from headway.daemon.records.shortages import MemoryShortage

SPARE_INDEX: Final = 2**32 - 1
"""Device index of a worker that has no device yet, also in its hello."""


@dataclass(frozen=True, slots=True, order=True)
class JobGeneration:
    """One plan of one job, to which every order and report belongs."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class Standstill:
    """A worker at a boundary, with its state live."""

    run_key: JobGeneration
    boundary: int
    best_batch: int | None = None
    """As in WorkerRecord."""


class OrderKind(StrEnum):
    """Kinds of orders to workers. Quit and those of UNANSWERED have no answer."""

    PREPARE = "prepare"
    START = "start"
    CHOOSE_STOP = "choose_stop"
    STOP_AT = "stop_at"
    WRITE = "write"
    RELEASE = "release"
    SPACE_SNAPSHOTS = "space_snapshots"
    TRIM_JOURNAL = "trim_journal"


UNANSWERED: Final = frozenset({OrderKind.SPACE_SNAPSHOTS, OrderKind.TRIM_JOURNAL})


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a worker could not do its part of a generation. Its fields except the text are as in
    WorkerRecord.
    """

    text: str
    batch: int = -1
    fault: str = ""
    is_hopeless: bool = False
    lost_peer: int = -1
    was_unreached: bool = False
    was_moved: bool = False
    shortage: MemoryShortage | None = None
    damaged: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker process, as far as its reports go."""

    device_index: int
    incarnation: str = ""
    """Incarnation of the process; empty while none has said hello."""
    pid: int = 0
    address: str = ""
    """Address at which its neighbours in the plan dial it."""
    job: str = ""
    """Job that it serves since the last Prepare, until Released."""
    prepared: JobGeneration | None = None
    started: JobGeneration | None = None
    layers: tuple[str, ...] = ()
    """Layers of the last Start."""
    has_journal: bool = False
    """True if the last Start made it write the journal."""
    chosen: Standstill | None = None
    stopped: Standstill | None = None
    pending: frozenset[tuple[OrderKind, JobGeneration]] = frozenset()
    """Orders without an answer yet."""
    num_damaged: int = 0
    """Damaged files that it refused to load since it was prepared."""
    failures: Mapping[JobGeneration, Failure] = field(default_factory=dict)
    """Reasons why it could not do its part of a generation: its process died, or it refused an order."""
    has_died: bool = False
    """True if a process was there, and the next one is not there yet."""

    @property
    def is_up(self) -> bool:
        """Return whether a process is there to take orders."""
        return bool(self.incarnation)

    def awaits(self, kind: OrderKind, run_key: JobGeneration) -> bool:
        """Return whether an order was given and not yet answered."""
        return (kind, run_key) in self.pending

    def ordered(self, kind: OrderKind, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after an order was given."""
        if kind in UNANSWERED:
            return self
        status = replace(self, pending=self.pending | {(kind, run_key)})
        return replace(status, job=run_key.job) if kind is OrderKind.PREPARE else status

    def answered(self, kind: OrderKind, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after the order was answered."""
        return replace(self, pending=self.pending - {(kind, run_key)})

    def starting(self, layers: tuple[str, ...], *, has_journal: bool) -> "WorkerStatus":
        """Return the status after Start was ordered: the worker will hold these layers."""
        return replace(self, layers=layers, has_journal=has_journal)

    def did_prepare(self, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it answered Prepare."""
        return replace(self.answered(OrderKind.PREPARE, run_key), prepared=run_key, job=run_key.job, num_damaged=0)

    def did_start(self, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it answered Start."""
        return replace(self.answered(OrderKind.START, run_key), started=run_key)

    def did_choose(self, chosen: Standstill) -> "WorkerStatus":
        """Return the status after it chose, as the lead of the first stage, where to stop."""
        return replace(self.answered(OrderKind.CHOOSE_STOP, chosen.run_key), chosen=chosen)

    def did_stop(self, stopped: Standstill) -> "WorkerStatus":
        """Return the status after it stopped at a boundary, by order or at the job's end."""
        return replace(self.answered(OrderKind.STOP_AT, stopped.run_key), stopped=stopped)

    def released(self) -> "WorkerStatus":
        """Return the status after it released its job: only the failures remain."""
        return WorkerStatus(
            device_index=self.device_index,
            incarnation=self.incarnation,
            pid=self.pid,
            address=self.address,
            failures=self.failures,
        )

    def failed(self, failure: Failure, *, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it could not do its part of one generation."""
        pending = frozenset(entry for entry in self.pending if entry[1] != run_key)
        return replace(self, pending=pending, failures={**self.failures, run_key: failure})

    def refused_file(self, run_key: JobGeneration) -> "WorkerStatus":
        """Return the status after it refused a damaged file: Start is due again, with another file."""
        return replace(self.answered(OrderKind.START, run_key), num_damaged=self.num_damaged + 1)

    def died(self, failure: Failure) -> "WorkerStatus":
        """Return the status after its process ended: every generation that it served is lost here."""
        served = {run_key for _, run_key in self.pending} | {
            run_key
            for run_key in (self.prepared, self.started, self.stopped.run_key if self.stopped else None)
            if run_key is not None and run_key.job == self.job
        }
        failures = {**self.failures, **{run_key: failure for run_key in served if run_key not in self.failures}}
        return WorkerStatus(device_index=self.device_index, failures=failures, has_died=True)

    def attached(self, incarnation: str, *, pid: int, address: str) -> "WorkerStatus":
        """Return the status after a new process said hello; the earlier process's failures stay."""
        return WorkerStatus(
            device_index=self.device_index, incarnation=incarnation, pid=pid, address=address, failures=self.failures
        )

    def forgetting(self, is_over: "frozenset[JobGeneration]") -> "WorkerStatus":
        """Return the status without the failures of generations that are over."""
        return replace(
            self, failures={run_key: why for run_key, why in self.failures.items() if run_key not in is_over}
        )
