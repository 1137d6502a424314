"""Finds the links that this node's workers have lost, with the ports and nodes at their other ends. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headway.daemon.reach.reach_target import Target, worker_target
from headway.daemon.records.records import PlanRecord
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.workers.status import JobGeneration, WorkerStatus


@dataclass(frozen=True, slots=True)
class LostLink:
    """One of our workers, and the neighbour that it no longer reaches or never reached."""

    run_key: JobGeneration
    device_index: int
    node: str
    """Node of the neighbour."""
    target: Target | None
    """Address of the neighbour, if etcd has it."""
    was_unreached: bool
    reason: str


def lost_links(view: ClusterView, workers: Iterable[WorkerStatus]) -> Iterator[LostLink]:
    """Yield the lost links of plans that etcd still names."""
    for worker in workers:
        for run_key, failure in worker.failures.items():
            plan = _plan(view, run_key)
            if plan is None or not 0 <= failure.lost_peer < len(plan.stages):
                continue
            stage = plan.stages[failure.lost_peer]
            record = view.jobs[run_key.job].workers_of(plan).get(failure.lost_peer)
            target = None
            if record is not None:
                target = worker_target(
                    stage.node, stage.node_incarnation, stage.device_index, record.address, record.incarnation
                )
            reason = failure.text.split("\n", 1)[0]
            yield LostLink(run_key, worker.device_index, stage.node, target, failure.was_unreached, reason)


def _plan(view: ClusterView, run_key: JobGeneration) -> PlanRecord | None:
    job = view.jobs.get(run_key.job)
    plans = (job.plan, job.next) if job is not None else ()
    return next((plan for plan in plans if plan is not None and plan.generation == run_key.generation), None)
