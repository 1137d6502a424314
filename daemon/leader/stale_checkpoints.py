"""Finds stale folders of boundaries in durable storage, which no run can use. Pure.

A folder stays incomplete when its boundary is given up before all of it was copied, or when the copier dies. A complete
folder is stale when the manifest was written but its record was not, because a compared key had changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from headway.daemon.records.lineage import Lineage
from headway.daemon.records.records import CheckpointRecord, Phase
from headway.daemon.situation.boundaries import age, lineage_of
from headway.daemon.storage.checkpoint_names import PartFile, folder_name
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView, Place

OVER: Final = frozenset({Phase.FINISHED, Phase.CANCELLED})
"""Final phases: no row leads out of them."""


@dataclass(frozen=True, slots=True)
class BoundaryFolder:
    """One boundary's folder of a submission in durable storage."""

    timeline: int
    boundary: int
    has_manifest: bool

    @property
    def place(self) -> Place:
        """The place as (timeline, boundary)."""
        return self.timeline, self.boundary


def stale_checkpoints(view: ClusterView, job: JobView, found: Iterable[BoundaryFolder]) -> list[BoundaryFolder]:
    """Return a job's folders that may be deleted.

    A stale folder stays stale: pasts only lose boundaries of older timelines, and checkpoints only get newer. So a view
    that lags behind names no folder that a present or later plan could complete or load from.
    """
    if job.submission is None or not job.submission.uid:
        return []  # without the submission's id, the folder may also belong to another job
    named = [url for other in view.jobs.values() for url in _named_by(other)]
    own = f"{job.name}/{job.submission.uid}"
    return [
        folder
        for folder in found
        if _is_stale(job, folder) and not any(url.endswith(f"{own}/{folder_name(*folder.place)}") for url in named)
    ]


def stale_parts(view: ClusterView, job: JobView, found: Iterable[PartFile]) -> list[PartFile]:
    """Return the files of a job's journal parts that may be deleted: no record names them, and no checkpoint will.

    Each checkpoint names the parts of the one before it, so the newest one names all that any checkpoint needs. All of
    these were whole before its record. So a partial file of such a part is of no use, whoever may still write to it.
    """
    if job.submission is None or not job.submission.uid:
        return []
    checkpoints = [other.checkpoint for other in view.jobs.values() if other.checkpoint is not None]
    named = {part.place for checkpoint in checkpoints for part in checkpoint.journal_parts}
    own = _own_checkpoint(job)
    whole = {part.place for part in own.journal_parts} if own is not None else frozenset()
    return [
        file
        for file in found
        if (file.place in whole and not file.is_whole) or (file.place not in named and _is_part_stale(job, file.place))
    ]


def _is_part_stale(job: JobView, place: Place) -> bool:
    return _is_stale(job, BoundaryFolder(*place, has_manifest=False)) or age(place) == _newest(job)


def _named_by(job: JobView) -> tuple[str, ...]:
    """Return the checkpoints from which a job may start; some may belong to another job, at other addresses."""
    checkpoint = job.checkpoint
    return tuple(url.rstrip("/") for url in (checkpoint.url, *checkpoint.earlier)) if checkpoint is not None else ()


def _is_stale(job: JobView, folder: BoundaryFolder) -> bool:
    checkpoint = _own_checkpoint(job)
    past = lineage_of(job)
    if past is None and checkpoint is not None:
        past = Lineage(timeline=checkpoint.timeline, ancestry=checkpoint.ancestry)
    if past is None or folder.timeline > past.timeline:
        return False  # as far as this daemon knows, nothing has run yet
    if not past.has(*folder.place):
        return True
    return age(folder.place) < _newest(job) or (job.phase.phase in OVER and not folder.has_manifest)


def _own_checkpoint(job: JobView) -> CheckpointRecord | None:
    """Return the job's newest checkpoint, unless another job wrote it."""
    return job.checkpoint if job.checkpoint is not None and not job.checkpoint.origin_job else None


def _newest(job: JobView) -> tuple[int, int]:
    """Return the age of the job's newest checkpoint."""
    checkpoint = _own_checkpoint(job)
    return age((checkpoint.timeline, checkpoint.boundary)) if checkpoint is not None else (-1, -1)
