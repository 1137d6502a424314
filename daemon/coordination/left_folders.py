"""Which folders of boundaries in durable storage no run can have a use for any more. Pure.

A folder is left half full when its boundary is given up before all of it was copied, or when the copier dies; and it is
left whole when the manifest was written and the record after it was not, because something had moved.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headway.daemon.coordination.boundaries import age, lineage_of
from headway.daemon.coordination.cluster_view import ClusterView, JobView, Place
from headway.daemon.lineage import Lineage
from headway.daemon.records import Phase
from headway.daemon.storage.checkpoint_names import folder_name

OVER: Final = frozenset({Phase.FINISHED, Phase.CANCELLED})
"""Nothing leads out of these."""


@dataclass(frozen=True, slots=True)
class BoundaryFolder:
    """One folder of a submission's in durable storage."""

    timeline: int
    boundary: int
    has_manifest: bool

    @property
    def place(self) -> Place:
        """(timeline, boundary)"""
        return self.timeline, self.boundary


def left_folders(view: ClusterView, job: JobView, found: Iterable[BoundaryFolder]) -> list[BoundaryFolder]:
    """Those of a job's folders that may be deleted.

    What is left stays left: pasts only lose boundaries of older timelines, checkpoints only get newer. So a view that
    lags behind names no folder that a plan of today, or of later, could complete or load from.
    """
    if job.submission is None or not job.submission.uid:
        return []  # without an id of the submission, the folder may be another job's too
    named = [url for other in view.jobs.values() for url in _named_by(other)]
    own = f"{job.name}/{job.submission.uid}"
    return [
        folder
        for folder in found
        if _is_left(job, folder) and not any(url.endswith(f"{own}/{folder_name(*folder.place)}") for url in named)
    ]


def _named_by(job: JobView) -> tuple[str, ...]:
    """The checkpoints that a job may begin with; another job's may be among them, at an address of its own."""
    checkpoint = job.checkpoint
    return tuple(url.rstrip("/") for url in (checkpoint.url, *checkpoint.earlier)) if checkpoint is not None else ()


def _is_left(job: JobView, folder: BoundaryFolder) -> bool:
    checkpoint = job.checkpoint if job.checkpoint is not None and not job.checkpoint.origin_job else None
    past = lineage_of(job)
    if past is None and checkpoint is not None:
        past = Lineage(timeline=checkpoint.timeline, ancestry=checkpoint.ancestry)
    if past is None or folder.timeline > past.timeline:
        return False  # nothing ran yet, as far as is known here
    if not past.has(*folder.place):
        return True
    newest = age((checkpoint.timeline, checkpoint.boundary)) if checkpoint is not None else (-1, -1)
    return age(folder.place) < newest or (job.phase.phase in OVER and not folder.has_manifest)
