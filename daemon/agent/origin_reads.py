"""How far this node has read the parts of a model's folder for its workers, and since when nothing has come."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from headway.daemon.records.measurements import ReadingRecord
from headway.daemon.storage.state_key import StateKey

SILENT_STEP_S: Final = 5.0
"""Silence is told in steps of this length; a shorter one is none."""

Clock = Callable[[], float]
"""Returns seconds."""


@dataclass(slots=True)
class OriginRead:
    """The read of one part. Threads write it, and the event loop reads it."""

    size_bytes: int
    moved_at: float
    clock: Clock
    num_bytes: int = 0
    has_ended: bool = False

    def reached(self, num_bytes: int) -> None:
        """Note how many bytes are there."""
        self.num_bytes, self.moved_at = num_bytes, self.clock()


class OriginReads:
    """The reads of all jobs."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._reads: dict[str, dict[StateKey, OriginRead]] = {}
        """By job, until the last one of the job has ended."""
        self._urls: dict[str, str] = {}

    @contextmanager
    def reading(self, job: str, key: StateKey, *, url: str, size_bytes: int) -> Iterator[OriginRead]:
        """Count a read while the body makes it."""
        read = OriginRead(size_bytes, self._clock(), self._clock)
        self._reads.setdefault(job, {})[key] = read
        self._urls[job] = url
        try:
            yield read
        finally:
            read.has_ended = True
            if all(each.has_ended for each in self._reads[job].values()):
                del self._reads[job], self._urls[job]

    def of(self, job: str) -> ReadingRecord | None:
        """Return how far the reads of a job are, together; None: there is none."""
        reads = self._reads.get(job, {}).values()
        if not reads:
            return None
        silent_s = self._clock() - max(read.moved_at for read in reads)
        return ReadingRecord(
            num_bytes=sum(read.num_bytes for read in reads),
            total_bytes=sum(read.size_bytes for read in reads),
            url=self._urls[job],
            silent_s=silent_s // SILENT_STEP_S * SILENT_STEP_S,
        )


def counted(chunks: Iterator[bytes], reached: Callable[[int], None]) -> Iterator[bytes]:
    """Yield the chunks, and tell after each how many bytes have come."""
    num_bytes = 0
    for chunk in chunks:
        num_bytes += len(chunk)
        reached(num_bytes)
        yield chunk
