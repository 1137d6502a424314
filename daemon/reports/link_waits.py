"""Names the pair of workers for which a job waits: before a plan is in force, and while a plan stands still. Pure."""

from headway.daemon.planning.pipeline_shape import worker_name
from headway.daemon.planning.plan_links import linked_pairs, neighbours
from headway.daemon.records.records import Phase, PlanRecord, WorkerState
from headway.daemon.situation.standstill import awaited_pair
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView

AT_WORK = (Phase.RUNNING, Phase.CHANGING, Phase.STOPPING)


def link_waits(view: ClusterView, job: JobView) -> list[str]:
    """Return sentences, the most telling first; empty while the job waits for no link."""
    found = _unreached(job, job.next) if job.next is not None else []
    plan = job.plan
    if plan is not None and job.phase.phase in AT_WORK:
        ways = view.blocked.between(linked_pairs(plan.stages, trains_tie=job.trains_tie))
        found += [f"a link of the plan could not be reopened: {way}" for way in ways.ways]
        if pair := awaited_pair(job, plan):
            waiting, awaited = (worker_name(plan.stages, position) for position in pair)
            found.append(f"no progress: {waiting} waits for {awaited}")
    return found


def _unreached(job: JobView, plan: PlanRecord) -> list[str]:
    """Return the neighbours of a prepared plan that are both ready and have not reached each other yet."""
    workers = job.workers_of(plan)
    return [
        f"waiting for {worker_name(plan.stages, position)} to reach {worker_name(plan.stages, other)} "
        f"at {workers[other].address}"
        for position, worker in sorted(workers.items())
        if worker.state is WorkerState.READY and worker.proven is not None
        for other in neighbours(plan.stages, position, trains_tie=job.trains_tie)
        if other not in worker.proven and other in workers and workers[other].state is WorkerState.READY
    ][:3]
