"""Decides which workers and nodes of one plan are ready, failed, lost or draining. Pure."""

from dataclasses import dataclass
from functools import cached_property

from headway.daemon.planning.cluster_plan import worker_name
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import NodeRecord, PlanRecord, WorkerPart, WorkerRecord, WorkerState
from headway.daemon.situation.boundaries import fewest_holders
from headway.daemon.situation.deadlines import LEASE_TTL_S
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView


def stays_out(node: NodeRecord, job: str) -> bool:
    """Return whether a node asks new plans of a job to leave it out."""
    return bool(node.stays_out or node.refusal(job))


@dataclass(frozen=True, kw_only=True)
class PlanHealth:
    """One plan at one moment. Without a plan, every answer is that nothing is wrong."""

    plan: PlanRecord | None
    job: JobView
    view: ClusterView
    now: float

    @property
    def stages(self) -> tuple[WorkerPart, ...]:
        """Return the parts of all workers."""
        return self.plan.workers if self.plan is not None else ()

    @cached_property
    def workers(self) -> dict[int, WorkerRecord]:
        """Return the workers' records for this plan, by position."""
        return self.job.workers_of(self.plan) if self.plan is not None else {}

    @property
    def unusable(self) -> WorkerPart | None:
        """Return a part whose node is absent, replaced, draining or staying out of new plans."""
        for stage in self.stages:
            node = self.view.nodes.get(stage.node)
            if node is None or node.incarnation != stage.node_incarnation:
                return stage
            if node.is_draining or stays_out(node, self.job.name):
                return stage
        return None

    @property
    def without_worker(self) -> WorkerPart | None:
        """Return a part whose device has no worker, because none starts there, and no report for this plan.

        A worker that died is missing too until its failure is recorded; that record says who is to blame.
        """
        workers = self.workers
        for position, stage in enumerate(self.stages):
            node = self.view.nodes.get(stage.node)
            is_down = node is not None and bool(node.worker_trouble) and stage.device_index in node.down_devices
            if is_down and position not in workers:
                return stage
        return None

    @property
    def staying_out(self) -> WorkerPart | None:
        """Return a part whose node stays out of new plans."""
        nodes, job = self.view.nodes, self.job.name
        out = (stage for stage in self.stages if stage.node in nodes and stays_out(nodes[stage.node], job))
        return next(out, None)

    @property
    def draining(self) -> tuple[str, ...]:
        """Return the draining nodes."""
        names = {stage.node for stage in self.stages}
        return tuple(sorted(name for name in names if name in self.view.nodes and self.view.nodes[name].is_draining))

    @property
    def failed_worker(self) -> tuple[int, WorkerRecord] | None:
        """Return (position, record) of a failed worker."""
        failed = (found for found in self.workers.items() if found[1].state is WorkerState.FAILED)
        return next(failed, None)

    def unready_workers(self, *states: WorkerState) -> tuple[int, ...]:
        """Return the positions of workers that are in none of the states."""
        workers, places = self.workers, range(len(self.stages))
        return tuple(place for place in places if place not in workers or workers[place].state not in states)

    def unready(self, *states: WorkerState) -> tuple[str, ...]:
        """Return `stage 1 on b` for every worker that is in none of the states."""
        return tuple(worker_name(self.stages, position) for position in self.unready_workers(*states))

    def stopped_at(self, boundary: int | None) -> bool:
        """Return whether every worker has stopped at a boundary."""
        workers = self.workers
        if self.plan is None or boundary is None or len(workers) != len(self.stages):
            return False
        return all(worker.state is WorkerState.STOPPED and worker.boundary == boundary for worker in workers.values())

    def can_load(self, *, heard_at: float) -> bool:
        """Return whether living nodes hold all files that the workers may have to load.

        heard_at: when nodes have had the time to write their missing records again.
        """
        plan = self.plan
        if plan is None or plan.source != "nodes" or plan.source_timeline == plan.timeline:
            return True
        if not self.unready_workers(WorkerState.RUNNING, WorkerState.STOPPED):
            return True
        if fewest_holders(self.job, (plan.source_timeline, plan.boundary), self.view.nodes) > 0:
            return True
        return self.now < heard_at

    @property
    def lost(self) -> WorkerPart | None:
        """Return a part whose node is lost."""
        return next((stage for position, stage in enumerate(self.stages) if self.is_lost(position)), None)

    def is_lost(self, position: int) -> bool:
        """Return whether the node of a part is lost."""
        lost_at = self.losses[position]
        return lost_at is not None and lost_at <= self.now

    @cached_property
    def losses(self) -> tuple[float | None, ...]:
        """Return for each part when its node counts as lost; None: it does not."""
        return tuple(map(self._lost_at, self.stages))

    def _lost_at(self, stage: WorkerPart) -> float | None:
        """Return when a stage's node counts as lost.

        A node is lost at once if it was replaced, or if it went while etcd was reachable. Otherwise only its lease may
        have ended, and it has one lease time to register again.
        """
        node = self.view.nodes.get(stage.node)
        if node is None:
            steady_since = self.view.steady_since
            since = self.view.absent_since.get(stage.node, self.view.started_at or 0.0)
            if Keys.node(stage.node) in self.view.unreadable:
                since += LEASE_TTL_S  # a living daemon writes its record again
            return max(since, steady_since + LEASE_TTL_S) if steady_since is not None else None
        return self.now if node.incarnation != stage.node_incarnation else None
