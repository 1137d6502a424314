"""Finds where a new start of a plan begins: the boundary, the source of its files, and the timeline. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.daemon.records.lineage import Lineage
from headway.daemon.records.records import NodeRecord
from headway.daemon.situation.boundaries import lineage_of, newest_complete
from headway.daemon.view.job_view import JobView


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first boundary of a plan, and the source of its files."""

    source: str
    """Source, as in PlanRecord."""
    boundary: int
    source_timeline: int
    lineage: Lineage
    """Lineage of the plan that begins here."""


def find_origin(
    job: JobView, nodes: Mapping[str, NodeRecord], *, generation: int, is_forgetful: bool = False
) -> Origin:
    """Return the newest available boundary of the job's own past; of two equally new, the one that nodes hold.

    Batches beyond it are given up, so a new timeline begins, named after the generation. The timeline continues only if
    nothing ran beyond the checkpoint. is_forgetful: etcd is older than the nodes' knowledge, so batches may have run
    beyond the checkpoint.
    """
    lineage, checkpoint = lineage_of(job), job.checkpoint
    place = newest_complete(job, nodes)
    if lineage is not None and place is not None and (checkpoint is None or place[1] >= checkpoint.boundary):
        return Origin(
            source="nodes",
            boundary=place[1],
            source_timeline=place[0],
            lineage=lineage.rolled_back(place, timeline=generation),
        )
    if checkpoint is None:
        return Origin(source="initial", boundary=0, source_timeline=generation, lineage=Lineage(timeline=generation))
    own = Lineage(timeline=checkpoint.timeline, ancestry=checkpoint.ancestry)
    if checkpoint.origin_job:
        # Another job numbers its timelines by its own generations, so its numbers mean nothing here.
        own = Lineage(timeline=generation)
    elif lineage is not None or is_forgetful:
        own = own.rolled_back((checkpoint.timeline, checkpoint.boundary), timeline=generation)
    return Origin(source="checkpoint", boundary=checkpoint.boundary, source_timeline=checkpoint.timeline, lineage=own)
