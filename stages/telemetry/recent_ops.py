"""The last operations of a worker, always kept, so that a user can ask afterwards what it did and when.

One slot of a list that is as long as it will ever be gets one tuple per operation. There is no lock: to store a
reference is one step for every thread, so a reader sees each slot as it was before or after, never half.
"""

from statistics import median
from typing import Final

from headway.stages.schedule.operations import Op

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
