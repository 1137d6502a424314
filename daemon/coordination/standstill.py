"""Which workers of a plan stand still, and for which neighbour each of them waits: from what their nodes tell. Pure."""

from headway.daemon.coordination.cluster_view import JobView
from headway.daemon.planning.blocked_ways import Pair, pair_of
from headway.daemon.records import PlanRecord


def standing(job: JobView, plan: PlanRecord) -> dict[int, int]:
    """Position of a worker that stands still to that of the neighbour that it waits for."""
    places = range(len(plan.stages))
    return {
        position: record.awaited_worker
        for (generation, position), record in job.goodput.items()
        if generation == plan.generation and position in places and record.awaited_worker in places
    }


def standing_pairs(job: JobView, plan: PlanRecord) -> frozenset[Pair]:
    """The nodes of those that wait and of those that are waited for."""
    return frozenset(
        pair_of(plan.stages[position].node, plan.stages[peer].node) for position, peer in standing(job, plan).items()
    )


def awaited_pair(job: JobView, plan: PlanRecord) -> tuple[int, int] | None:
    """The end of the chain of workers that wait for one another, if no other worker is at work; None: one is."""
    waits = standing(job, plan)
    if not waits or len(waits) + 1 < len(plan.stages):
        return None
    position, seen = min(waits), set[int]()
    while waits[position] in waits and position not in seen:
        seen.add(position)
        position = waits[position]
    return position, waits[position]
