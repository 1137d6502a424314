"""Finds the workers of a plan that stand still, and the neighbour for which each waits, from nodes' reports. Pure."""

from headway.daemon.costs.paths import Pair, pair_of
from headway.daemon.records.records import PlanRecord
from headway.daemon.view.job_view import JobView


def standing(job: JobView, plan: PlanRecord) -> dict[int, int]:
    """Return the position of each worker that stands still, with that of the neighbour for which it waits."""
    places = range(len(plan.workers))
    return {
        position: record.awaited_worker
        for (generation, position), record in job.goodput.items()
        if generation == plan.generation and position in places and record.awaited_worker in places
    }


def standing_pairs(job: JobView, plan: PlanRecord) -> frozenset[Pair]:
    """Return pairs of nodes: one that waits, and the one for which it waits."""
    return frozenset(
        pair_of(plan.workers[position].node, plan.workers[peer].node) for position, peer in standing(job, plan).items()
    )


def awaited_pair(job: JobView, plan: PlanRecord) -> tuple[int, int] | None:
    """Return the end of the chain of workers that wait for one another; None: some other worker is working."""
    waits = standing(job, plan)
    if not waits or len(waits) + 1 < len(plan.workers):
        return None
    position, seen = min(waits), set[int]()
    while waits[position] in waits and position not in seen:
        seen.add(position)
        position = waits[position]
    return position, waits[position]
