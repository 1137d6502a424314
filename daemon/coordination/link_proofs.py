"""Finds the links of a plan that are blocked or not proven yet, from facts and the workers' records. Pure."""

from headway.daemon.costs.link_choice import linked_pairs, neighbours
from headway.daemon.costs.paths import BlockedWays
from headway.daemon.records.records import WorkerRecord
from headway.daemon.situation.plan_health import PlanHealth


def blocked_links(health: PlanHealth) -> BlockedWays:
    """Return the ways between neighbours of a plan on which one does not reach the other."""
    blocked = health.view.blocked
    return blocked and blocked.between(linked_pairs(health.stages, trains_tie=health.job.trains_tie))


def unproven(health: PlanHealth) -> tuple[tuple[int, int], ...]:
    """Return (position, neighbour) for workers that have reported and have not reached all their neighbours yet."""
    workers = health.workers
    return tuple(
        (position, other)
        for position, worker in sorted(workers.items())
        for other in neighbours(health.stages, position, trains_tie=health.job.trains_tie)
        if not _has_reached(worker, other, workers.get(other))
    )


def _has_reached(worker: WorkerRecord, other: int, neighbour: WorkerRecord | None) -> bool:
    """Return whether a worker's node has dialled a neighbour's present process: the neighbour may have been
    replaced.
    """
    if worker.proven is None:
        return True
    if other not in worker.proven:
        return False
    processes = dict(zip(worker.proven, worker.proven_workers, strict=False))
    return neighbour is None or processes.get(other, neighbour.incarnation) == neighbour.incarnation
