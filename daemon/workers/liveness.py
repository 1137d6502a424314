"""Decides when a worker counts as dead although its process exists: it is silent, stands still, or owes an answer.
Pure.

All times are seconds of one clock that the caller reads. The judge must have been awake: when the daemon itself was
stopped for a while, every clock here restarts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headway.daemon.jobs.job import PLAIN_S
from headway.daemon.workers.status import JobGeneration, OrderKind, WorkerStatus

TICK_S: Final = 0.5
"""Interval of the daemon's judgements."""
STALL_S: Final = 2.0
"""A judge that comes later than this was itself stopped."""
HELLO_TIMEOUT_S: Final = 120.0
"""Time for a new process to import the model and to attach."""
SERVING_SILENCE_S: Final = 5.0
"""Maximum silence while it serves a generation; a living worker reports every second."""
BUSY_SILENCE_S: Final = 15.0
"""Maximum silence while it owes an answer with its own deadline: reading and importing may block its other thread."""
IDLE_SILENCE_S: Final = 30.0
MIN_STANDSTILL_S: Final = 5.0
STANDSTILL_FACTOR: Final = 20.0
"""Multiple of the typical seconds of an operation that one operation may take."""
LAUNCHED_FACTOR: Final = 4.0
"""Multiple of the seconds of all launched work that one operation may take on a device that works later."""
PREPARING_STANDSTILL_S: Final = 20.0
"""The limit while it also owes an answer to Prepare, which it handles between two operations."""
FIRST_OPERATION_S: Final = 120.0
"""Time for the first operation of its kind in a generation, which may have to compile and to allocate, …"""
FIRST_OPERATION_BATCHES: Final = 4.0
"""… plus this multiple of a batch's predicted time."""
LOADING_S: Final = 300.0
"""Time to load or to write layers, in addition to the time for their bytes."""
ANSWER_TIMEOUT_S: Final[Mapping[OrderKind, float]] = {
    OrderKind.PREPARE: PLAIN_S,
    OrderKind.START: LOADING_S,
    OrderKind.WRITE: LOADING_S,
    OrderKind.RELEASE: 60.0,
}
"""Time after which a worker without answer is killed. A stop takes as long as its batch; the coordinator
watches that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat's figures about the run."""

    run_key: JobGeneration
    num_operations: int
    """Operations done since the start of the generation."""
    is_runnable: bool
    """True if an operation runs or could run."""
    typical_s: float
    """Median seconds of an operation; 0: none was done."""
    batch: int = -1
    expected_s: float = 0.0
    """Mean seconds of operations of the running kind; 0: none of the kind was done."""
    num_steps: int = 0
    """Number of update parts that the process has done: an advancing update does not stand still."""
    launched_s: float | None = None
    """Seconds of work that its device may have before it, as launched_work.py counts; 0: its layers are not timed yet.
    None: the device computes at once.
    """

    @property
    def progress(self) -> tuple[JobGeneration, int, int]:
        """Return a value that changes with any progress."""
        return self.run_key, self.num_operations, self.num_steps


@dataclass(frozen=True, slots=True)
class _Deadline:
    """The time when an answer is overdue, and the time that was given."""

    at: float
    within_s: float


class StallWatch:
    """Notices that its own process was stopped."""

    def __init__(self, now: float) -> None:
        self._ticked_at = now

    def tick(self, now: float) -> float:
        """Return for how long the process was stopped since the last tick; 0 when it was not."""
        late_s = now - self._ticked_at - TICK_S
        self._ticked_at = now
        return late_s if late_s > STALL_S else 0.0


class Liveness:
    """The life of one worker process, from its start to its end."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._felt_at = now
        self._moved_at = now
        self._deadlines: dict[tuple[OrderKind, JobGeneration], _Deadline] = {}
        self._first_operation_s = FIRST_OPERATION_S
        self._launches = False
        self.beat: Beat | None = None
        """The newest heartbeat of this process's present generation."""

    def heard(self, now: float) -> None:
        """Note that a report arrived."""
        self._heard_at = now

    def on_heartbeat(self, beat: Beat, now: float) -> None:
        """Note that a heartbeat arrived."""
        self._heard_at = self._felt_at = now
        before = self.beat
        is_same = before is not None and before.progress == beat.progress
        if not (is_same and before is not None and before.is_runnable and beat.is_runnable):
            self._moved_at = now
        self.beat = beat

    def ordered(
        self,
        kind: OrderKind,
        run_key: JobGeneration,
        now: float,
        *,
        within_s: float | None = None,
        batch_s: float = 0.0,
        launches: bool = False,
    ) -> None:
        """Note an order that has to be answered. within_s: overrides the time of its kind.

        batch_s: for a Start, the predicted seconds of a batch. launches: whether its device computes later than the
        worker launches.
        """
        if kind is OrderKind.START:
            self._launches = launches
            self._first_operation_s = FIRST_OPERATION_S + FIRST_OPERATION_BATCHES * batch_s
        within_s = ANSWER_TIMEOUT_S.get(kind) if within_s is None else within_s
        if within_s is not None:
            self._deadlines[kind, run_key] = _Deadline(now + within_s, within_s)

    def on_watchdog_stall(self, stalled_s: float, now: float) -> None:
        """Restart all times, because the judge was stopped: missing reports prove nothing."""
        self._heard_at = self._felt_at = self._moved_at = now
        self._deadlines = {
            entry: _Deadline(deadline.at + stalled_s, deadline.within_s) for entry, deadline in self._deadlines.items()
        }

    def complaint(self, status: WorkerStatus, now: float) -> str:
        """Return why the process is to be killed; None while it is well."""
        owed = [entry for entry in self._deadlines if entry in status.pending]
        self._deadlines = {entry: self._deadlines[entry] for entry in owed}
        if not status.is_up:
            return self._overdue(HELLO_TIMEOUT_S, now, "did not say hello within")
        for kind, run_key in owed:
            if now >= (deadline := self._deadlines[kind, run_key]).at:
                return f"did not answer the order {kind} within {deadline.within_s:g} s"
        owed_kinds = {kind for kind, _ in owed}
        if owed_kinds - {OrderKind.PREPARE}:
            self._moved_at = now
        silence_s = BUSY_SILENCE_S if owed else self._serving_silence() if status.job else IDLE_SILENCE_S
        least_s = PREPARING_STANDSTILL_S if owed_kinds else MIN_STANDSTILL_S
        return self._overdue(silence_s, now, "said nothing for") or self._stands_still(status, least_s)

    def _overdue(self, limit_s: float, now: float, what: str) -> str:
        return f"{what} {limit_s:g} s" if now - self._heard_at >= limit_s else ""

    def _serving_silence(self) -> float:
        """Return the maximum silence while it serves a generation.

        A call into a card's driver may wait for everything that was launched, and keep the interpreter until then. So a
        heartbeat may come only when that is done.
        """
        if not self._launches:
            return SERVING_SILENCE_S
        launched_s = self.beat.launched_s if self.beat is not None else None
        return max(SERVING_SILENCE_S, LAUNCHED_FACTOR * launched_s) if launched_s else BUSY_SILENCE_S

    def _standstill_limit(self, beat: Beat, least_s: float) -> float:
        """Return the most seconds without progress.

        Times of launches do not limit a device that works later: all that was launched does, once it was timed.
        """
        if not beat.expected_s or beat.launched_s == 0.0:
            return self._first_operation_s
        usual_s = max(beat.typical_s, beat.expected_s)
        return max(least_s, STANDSTILL_FACTOR * usual_s, LAUNCHED_FACTOR * (beat.launched_s or 0.0))

    def _stands_still(self, status: WorkerStatus, least_s: float) -> str:
        """Return whether heartbeats show a standstill; missing heartbeats prove nothing."""
        beat = self.beat
        if beat is None or beat.run_key != status.started or not beat.is_runnable:
            return ""
        limit_s = self._standstill_limit(beat, least_s)
        if self._felt_at - self._moved_at < limit_s:
            return ""
        return (
            f"stood still for {limit_s:.3g} s in batch {beat.batch}, {beat.num_operations} operations after its start"
        )
