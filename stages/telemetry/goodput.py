"""Where a worker's seconds went: every second since it began to serve a job is in exactly one class.

`useful`: from an operation's begin on, until the stage has to wait; of batches that had never got this far
`replay`: the same, of batches that are computed again after a rollback
`snapshot`: an update could run, but the snapshot writer still reads what it would change
`waiting:<neighbour>`: nothing is runnable until a neighbour sends something; `waiting:stage 2`
`bubble`: the same, where a schedule without delay cannot help it: no batch is half forwarded, so the stage fills
(before a batch's first forward) or drains (after its last forward, until the update)
`recovery`: from the last operation before a rollback to the first one after it
`replan`: from the boundary of a planned change to the first operation after it
`idle`: the job is served, and none of these is the case
"""

from statistics import median
from threading import Lock
from time import perf_counter
from typing import Final

from headway.stages.schedule.operations import Op

USEFUL, REPLAY, SNAPSHOT, BUBBLE = "useful", "replay", "snapshot", "bubble"
RECOVERY, REPLAN, IDLE = "recovery", "replan", "idle"
_WORK = frozenset({USEFUL, REPLAY})


def waiting_for(peer: str) -> str:
    """The class of a wait for a neighbour, whatever its address is."""
    return f"waiting:{peer.partition(' at ')[0]}"


class Goodput:
    """One job on one worker. Written by the main thread, read by any. Times are `perf_counter`'s."""

    def __init__(self, *, now: float | None = None) -> None:
        self._lock = Lock()
        self._class = IDLE
        self._since = perf_counter() if now is None else now
        self._seconds: dict[str, float] = {}
        self._since_work: dict[str, float] = {}
        """Time accounted since the last operation: a rollback turns it into recovery."""
        self._furthest = 0
        self.num_replayed = 0
        """Batches computed again."""
        self.replan_s = 0.0
        """Seconds of the last planned change, from its boundary to the next operation; 0: there was none."""
        self._replans_since: float | None = None

    def begin_generation(self, *, furthest: int) -> None:
        """furthest: operations of batches below are replay."""
        self._furthest = furthest

    def operates(self, batch: int, now: float) -> None:
        """An operation begins."""
        what = USEFUL if batch >= self._furthest else REPLAY
        if what is not self._class:
            self._switch(what, now)

    def updated(self, batch: int) -> None:
        """A batch is applied."""
        if batch < self._furthest:
            self.num_replayed += 1

    def waits(self, what: str, now: float) -> None:
        """No operation is running: the stage waits, changes its plan, recovers or has nothing to do."""
        if what != self._class:
            if what == REPLAN and not _WORK.isdisjoint((*self._seconds, self._class)):
                self._replans_since = now
            self._switch(what, now)

    def recovers(self, now: float) -> None:
        """A rollback has begun: all time since the last operation is its price."""
        with self._lock:
            self._account(now)
            for what, seconds in self._since_work.items():
                self._seconds[what] -= seconds
            lost = sum(self._since_work.values())
            self._seconds[RECOVERY] = self._seconds.get(RECOVERY, 0.0) + lost
            self._since_work = {RECOVERY: lost}
            self._replans_since = None
            self._class = RECOVERY

    def seconds(self, now: float) -> dict[str, float]:
        """Class to seconds so far."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._class] = seconds.get(self._class, 0.0) + max(0.0, now - self._since)
        return {what: spent for what, spent in seconds.items() if spent > 0.0}

    def _switch(self, what: str, now: float) -> None:
        with self._lock:
            self._account(now)
            self._class = what
            if what in _WORK:
                self._since_work = {}
                if self._replans_since is not None:
                    self.replan_s, self._replans_since = now - self._replans_since, None

    def _account(self, now: float) -> None:
        spent = max(0.0, now - self._since)
        self._since = max(now, self._since)
        self._seconds[self._class] = self._seconds.get(self._class, 0.0) + spent
        if self._class not in _WORK:
            self._since_work[self._class] = self._since_work.get(self._class, 0.0) + spent


NUM_KEPT: Final = 8192
"""Operations; a batch has two per microbatch, and one."""
NUM_TYPICAL: Final = 64
"""Operations that a typical time is the median of."""

TimedRecord = tuple[Op, int, float, float]
"""(operation, weight version that it read, started, ended); seconds of CLOCK_MONOTONIC."""


class RecentOps:
    """Written by one thread, read by any."""

    def __init__(self, *, num_kept: int = NUM_KEPT) -> None:
        self._slots: list[TimedRecord | None] = [None] * num_kept
        self._num_kept = num_kept
        self.num_recorded = 0
        """Operations that were done, also those that are forgotten."""

    def record(self, op: Op, version: int, started: float, ended: float) -> None:
        """Remember an operation in place of the oldest."""
        self._slots[self.num_recorded % self._num_kept] = (op, version, started, ended)
        self.num_recorded += 1

    @property
    def newest(self) -> list[TimedRecord]:
        """Return the remembered operations, in order."""
        slots = self._slots.copy()
        return sorted((slot for slot in slots if slot is not None), key=_started)

    def typical_s(self, kind: type[Op] | None = None) -> float:
        """Median seconds of the newest operations, or of the newest of one kind. 0: none is remembered."""
        seconds: list[float] = []
        for position in range(self.num_recorded - 1, self.num_recorded - 1 - self._num_kept, -1):
            record = self._slots[position % self._num_kept]
            if record is None or len(seconds) == NUM_TYPICAL:
                break
            if kind is None or type(record[0]) is kind:
                seconds.append(record[3] - record[2])
        return median(seconds) if seconds else 0.0


def _started(record: TimedRecord) -> float:
    return record[2]
