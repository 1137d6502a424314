"""What gives the workers of a plan more time to start: bytes that are read, and storage that answers again. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from headway.daemon.measurements import ReadingRecord
from headway.daemon.records import NodeRecord

if TYPE_CHECKING:
    from headway.daemon.coordination.cluster_view import JobView


MOST_READINGS: Final = 3
"""That count, of one node in one phase: of a copy that proves damaged, then of the one fetched instead."""


@dataclass(frozen=True, slots=True)
class ReadingSoFar:
    """Of one node, in the present phase of a job."""

    num_bytes: int
    """That it said last."""
    least_left: int
    """The fewest bytes that were left since it began."""
    num_begun: int = 1
    """How often it began from the start."""


def note_reading(job: "JobView", node: str, record: ReadingRecord, *, now: float) -> None:
    """A node has got on when less is left than ever since it began: not by standing still.

    One that begins again has as much to read as before. That counts a few times, not for ever.
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
    """A node says no more that it cannot read what a job starts from."""
    for job in jobs if before is not None and before.ailments != after.ailments else ():
        if before is not None and before.storage_trouble(job.name) and not after.storage_trouble(job.name):
            job.read_at = now
