"""Extends the time for a plan's workers to start: data is being read, or storage answers again. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from headway.daemon.records.measurements import ReadingRecord
from headway.daemon.records.records import NodeRecord

if TYPE_CHECKING:
    from headway.daemon.view.job_view import JobView


MOST_READINGS: Final = 3
"""Number of reads that count of one node in one phase: one of a copy that proves damaged, one of its replacement."""


@dataclass(frozen=True, slots=True)
class ReadingSoFar:
    """The reading of one node in the present phase of a job."""

    num_bytes: int
    """Bytes read by the last report."""
    least_left: int
    """Fewest bytes left since the read began."""
    num_begun: int = 1
    """Number of times that the read began from the start."""


def note_reading(job: "JobView", node: str, record: ReadingRecord, *, now: float) -> None:
    """Note a report: a node has progressed when it has less left than ever since it began.

    A read that begins again has as many bytes left as before. That counts a few times, not for ever.
    """
    left = record.total_bytes - record.num_bytes
    known = job.readings_so_far.get(node)
    if known is None:
        job.readings_so_far[node] = ReadingSoFar(record.num_bytes, left)
    elif record.num_bytes < known.num_bytes and left > known.least_left and known.num_begun < MOST_READINGS:
        job.readings_so_far[node] = ReadingSoFar(record.num_bytes, left, known.num_begun + 1)
    else:
        least_left = min(left, known.least_left)
        job.readings_so_far[node] = replace(known, num_bytes=record.num_bytes, least_left=least_left)
        if left >= known.least_left:
            return
    job.read_at = now


def note_storage(jobs: Iterable["JobView"], before: NodeRecord | None, after: NodeRecord, *, now: float) -> None:
    """Note that a node no longer reports unreadable storage."""
    for job in jobs if before is not None and before.ailments != after.ailments else ():
        if before is not None and before.storage_trouble(job.name) and not after.storage_trouble(job.name):
            job.read_at = now
