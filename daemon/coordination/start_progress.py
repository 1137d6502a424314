"""What gives the workers of a plan more time to start: bytes that are read, and storage that answers again. Pure."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from headway.daemon.measurements import ReadingRecord
from headway.daemon.records import NodeRecord

if TYPE_CHECKING:
    from headway.daemon.coordination.cluster_view import JobView


def note_reading(job: "JobView", node: str, record: ReadingRecord, *, now: float) -> None:
    """A node has got on when less is left than ever in this phase: not by standing still, or by reading it again."""
    left = record.total_bytes - record.num_bytes
    if left < job.least_to_read.get(node, left + 1):
        job.least_to_read[node] = left
        job.read_at = now


def note_storage(jobs: Iterable["JobView"], before: NodeRecord | None, after: NodeRecord, *, now: float) -> None:
    """A node says no more that it cannot read what a job starts from."""
    for job in jobs if before is not None and before.ailments != after.ailments else ():
        if before is not None and before.storage_trouble(job.name) and not after.storage_trouble(job.name):
            job.read_at = now
