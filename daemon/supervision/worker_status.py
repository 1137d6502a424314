"""What a daemon knows about one of its workers: a value that reports and orders turn into the next one. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

SPARE_INDEX: Final = 2**32 - 1
"""The device index of a worker that has no device yet, also in its hello."""


@dataclass(frozen=True, slots=True, order=True)
class JobGeneration:
    """One plan of one job: what every order and report belongs to."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class Standstill:
    """A worker at a boundary, with its state live."""

    of: JobGeneration
    boundary: int


class OrderKind(StrEnum):
    """What workers are ordered. Quit and the spacing of snapshots have no answer."""

    PREPARE = "prepare"
    START = "start"
    CHOOSE_STOP = "choose_stop"
    STOP_AT = "stop_at"
    WRITE = "write"
    RELEASE = "release"
    SPACE_SNAPSHOTS = "space_snapshots"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a worker could not do its part of a generation. All but the text is as in WorkerRecord."""

    text: str
    batch: int = -1
    fault: str = ""
    is_hopeless: bool = False
    lost_peer: int = -1
    was_unreached: bool = False
    was_moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One worker process, as far as its reports go."""

    device_index: int
    incarnation: str = ""
    """Empty while no process has said hello."""
    pid: int = 0
    address: str = ""
    """Where its neighbours in the plan dial."""
    job: str = ""
    """The job it serves since the last Prepare, until Released."""
    prepared: JobGeneration | None = None
    started: JobGeneration | None = None
    layers: tuple[str, ...] = ()
    """Of the last Start."""
    has_journal: bool = False
    """Of the last Start: whether it writes the journal."""
    chosen: Standstill | None = None
    stopped: Standstill | None = None
    pending: frozenset[tuple[OrderKind, JobGeneration]] = frozenset()
    """Orders without an answer yet."""
    num_damaged: int = 0
    """Files that it refused to load since it was prepared, because they are not what they should be."""
    failures: Mapping[JobGeneration, Failure] = field(default_factory=dict)
    """Why it could not do its part of a generation: its process died, or it refused an order."""
    has_died: bool = False
    """A process was there, and the next one is not there yet."""

    @property
    def is_up(self) -> bool:
        """Whether a process is there to take orders."""
        return bool(self.incarnation)

    def awaits(self, kind: OrderKind, of: JobGeneration) -> bool:
        """Whether an order has been given and not been answered."""
        return (kind, of) in self.pending

    def ordered(self, kind: OrderKind, of: JobGeneration) -> "WorkerStatus":
        """After an order was given."""
        if kind is OrderKind.SPACE_SNAPSHOTS:
            return self
        status = replace(self, pending=self.pending | {(kind, of)})
        return replace(status, job=of.job) if kind is OrderKind.PREPARE else status

    def answered(self, kind: OrderKind, of: JobGeneration) -> "WorkerStatus":
        """After its answer came."""
        return replace(self, pending=self.pending - {(kind, of)})

    def starting(self, layers: tuple[str, ...], *, has_journal: bool) -> "WorkerStatus":
        """After Start was ordered: these layers are what it will hold."""
        return replace(self, layers=layers, has_journal=has_journal)

    def did_prepare(self, of: JobGeneration) -> "WorkerStatus":
        """After it answered Prepare."""
        return replace(self.answered(OrderKind.PREPARE, of), prepared=of, job=of.job, num_damaged=0)

    def did_start(self, of: JobGeneration) -> "WorkerStatus":
        """After it answered Start."""
        return replace(self.answered(OrderKind.START, of), started=of)

    def did_choose(self, chosen: Standstill) -> "WorkerStatus":
        """After it chose, as the lead of the first stage, where to stop."""
        return replace(self.answered(OrderKind.CHOOSE_STOP, chosen.of), chosen=chosen)

    def did_stop(self, stopped: Standstill) -> "WorkerStatus":
        """After it came to a boundary, by order or because the job ends there."""
        return replace(self.answered(OrderKind.STOP_AT, stopped.of), stopped=stopped)

    def released(self) -> "WorkerStatus":
        """After it let go of its job: nothing of it is left but the failures."""
        return WorkerStatus(
            device_index=self.device_index,
            incarnation=self.incarnation,
            pid=self.pid,
            address=self.address,
            failures=self.failures,
        )

    def failed(self, failure: Failure, *, of: JobGeneration) -> "WorkerStatus":
        """After it could not do its part of one generation."""
        pending = frozenset(entry for entry in self.pending if entry[1] != of)
        return replace(self, pending=pending, failures={**self.failures, of: failure})

    def refused_file(self, of: JobGeneration) -> "WorkerStatus":
        """After it could not start because a file is damaged: Start is due again, with another file."""
        return replace(self.answered(OrderKind.START, of), num_damaged=self.num_damaged + 1)

    def died(self, failure: Failure) -> "WorkerStatus":
        """After its process ended: every generation that it served is lost here."""
        served = {of for _, of in self.pending} | {
            of
            for of in (self.prepared, self.started, self.stopped.of if self.stopped else None)
            if of is not None and of.job == self.job
        }
        failures = {**self.failures, **{of: failure for of in served if of not in self.failures}}
        return WorkerStatus(device_index=self.device_index, failures=failures, has_died=True)

    def attached(self, incarnation: str, *, pid: int, address: str) -> "WorkerStatus":
        """After a process said hello that has done nothing yet; what the one before it failed at is kept."""
        return WorkerStatus(
            device_index=self.device_index, incarnation=incarnation, pid=pid, address=address, failures=self.failures
        )

    def forgetting(self, is_over: "frozenset[JobGeneration]") -> "WorkerStatus":
        """Without the failures of generations that are over."""
        return replace(self, failures={of: why for of, why in self.failures.items() if of not in is_over})
