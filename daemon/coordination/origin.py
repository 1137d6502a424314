"""Where a plan that starts anew begins: which boundary, whose files, and on which timeline. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from headway.daemon.coordination.boundaries import lineage_of, newest_complete
from headway.daemon.coordination.cluster_view import JobView
from headway.daemon.lineage import Lineage
from headway.daemon.records import NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The first boundary of a plan, and where its files are."""

    source: str
    """As in PlanRecord."""
    boundary: int
    source_timeline: int
    lineage: Lineage
    """Of the plan that begins here."""


def find_origin(
    job: JobView, nodes: Mapping[str, NodeRecord], *, generation: int, is_forgetful: bool = False
) -> Origin:
    """The newest boundary of the job's own past that can be had; of two equally new, the one that nodes hold.

    What ran beyond it is given up, and so a new timeline begins, named after the generation. Only when nothing ran
    beyond the checkpoint does its timeline go on. is_forgetful: etcd is older than what nodes know, so something may
    have run beyond it.
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
        # Another job's timelines are numbered by its own generations: they say nothing here.
        own = Lineage(timeline=generation)
    elif lineage is not None or is_forgetful:
        own = own.rolled_back((checkpoint.timeline, checkpoint.boundary), timeline=generation)
    return Origin(source="checkpoint", boundary=checkpoint.boundary, source_timeline=checkpoint.timeline, lineage=own)
