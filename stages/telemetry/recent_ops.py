"""The last operations of a worker, always kept, so that a user can ask afterwards what it did and when.

Each operation writes one tuple into one slot of a list of fixed length. There is no lock: storing a reference is one
step for every thread. So a reader sees each slot as it was before or after, never half.
"""

from typing import Final

from headway.stages.schedule.schedule import Op
from headway.stages.telemetry.history import Recorder

NUM_KEPT: Final = 8192
"""Number of operations kept; a batch has two per microbatch, and one."""

TimedRecord = tuple[Op, int, float, float]
"""(operation, weight version that it read, started, ended); seconds of CLOCK_MONOTONIC."""


class RecentOps:
    """A recorder with a short memory. Written by one thread, read by any."""

    def __init__(self, *, then: Recorder | None = None, num_kept: int = NUM_KEPT) -> None:
        """then: receives every operation too."""
        self._slots: list[TimedRecord | None] = [None] * num_kept
        self._num_kept = num_kept
        self._num_recorded = 0
        self._then = then

    def record(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None:
        """Remember an operation in place of the oldest."""
        self._slots[self._num_recorded % self._num_kept] = (op, version, started, ended)
        self._num_recorded += 1
        if self._then is not None:
            self._then.record(op, version=version, num_versions_live=num_versions_live, started=started, ended=ended)

    @property
    def newest(self) -> list[TimedRecord]:
        """Return the remembered operations, in order."""
        slots = self._slots.copy()
        return sorted((slot for slot in slots if slot is not None), key=_started)


def _started(record: TimedRecord) -> float:
    return record[2]
