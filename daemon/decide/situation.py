"""One job as the coordinator sees it at one moment: the facts that conditions and actions share. Pure.

plan_lookup.py has its plans, deadlines.py its waits, plan_health.py the state of a plan, lost_workers.py its losses.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import DeviceShortage
from headway.daemon.cluster.records import (
    DeviceKey,
    Phase,
    PlanRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.cluster.state_key import JOURNAL
from headway.daemon.decide.allocate import Allocation, left_alone_s
from headway.daemon.decide.boundaries import Origin, fewest_holders, find_origin
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.deadlines import LEASE_TTL_S, Deadlines
from headway.daemon.decide.failures import LostWorkers, shortages_now
from headway.daemon.decide.job_view import JobView
from headway.daemon.decide.plans import PlanLookup, Plans, PlansAtOnce
from headway.daemon.decide.quarantine import QUARANTINE_AFTER
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.cluster_plan import is_moving, worker_name
from headway.daemon.plan.link_choice import linked_pairs, neighbours
from headway.daemon.plan.paths import BlockedWays


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
            if node.is_draining or node.stays_out:
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
        nodes = self.view.nodes
        out = (stage for stage in self.stages if stage.node in nodes and nodes[stage.node].stays_out)
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
    return other in worker.proven and (neighbour is None or worker.proven[other] == neighbour.incarnation)


PATIENCE_SNAPSHOTS: Final = 2
"""Falling back by more snapshots than this is worth a wait of LEASE_TTL_S for nodes that register their files again."""
LONGEST_PATIENCE_S: Final = 6 * LEASE_TTL_S
"""Limit of that whole wait: a node that keeps joining and leaving must not delay a job without end."""


@dataclass(kw_only=True)
class JobSituation:
    """A job, the cluster, and the time; what is derived is computed once, when first asked for."""

    job: JobView
    view: ClusterView
    now: float
    written_at: float
    """Seconds since the epoch, for people to read."""
    busy: frozenset[DeviceKey] = field(default=frozenset())
    """Devices that other jobs have or claim."""
    allocation: Allocation = field(default_factory=Allocation)
    ahead: tuple[str, ...] = ()
    """Waiting jobs that are served before this one, in order."""
    why: str = ""
    """What the condition of the row that holds says is wrong; its action quotes it."""
    quarantine_after: int = QUARANTINE_AFTER
    """Failures of a node within the quarantine's time, after which it is left out; 0: never."""
    plan_source: Plans = field(default_factory=PlansAtOnce)

    @cached_property
    def spec(self) -> JobSpec:
        """Return the submitted spec. Jobs without one are not decided about."""
        spec = self.job.spec
        assert spec is not None
        return spec

    @cached_property
    def current(self) -> PlanHealth:
        """Return the health of the plan in force."""
        return self._health(self.job.plan)

    @cached_property
    def next(self) -> PlanHealth:
        """Return the health of the plan in preparation."""
        return self._health(self.job.next)

    @cached_property
    def end(self) -> int:
        """Return the job's last boundary. An earlier one than the last batch's is known once a worker stands there."""
        return self.spec.train.batches if self.early_end is None else self.early_end[0]

    @cached_property
    def early_end(self) -> tuple[int, int] | None:
        """Return the boundary at which evaluations end the job, and the best one's batch; None: none has."""
        for worker in self.current.workers.values():
            if worker.state is WorkerState.STOPPED and worker.boundary is not None and worker.best_batch is not None:
                return worker.boundary, worker.best_batch
        return None

    def _health(self, plan: PlanRecord | None) -> PlanHealth:
        return PlanHealth(plan=plan, job=self.job, view=self.view, now=self.now)

    @cached_property
    def gives_way_to(self) -> tuple[str, ...]:
        """Return the jobs that are owed devices of this one."""
        return self.allocation.claimed_from(self.job.name)

    @property
    def left_alone_until(self) -> float:
        """Return until when the job is not stopped for others, although it may shrink; 0: there is no other job."""
        return self.job.started_at + left_alone_s(self.job, self.view) if self.allocation.claimants else 0.0

    @cached_property
    def deadlines(self) -> Deadlines:
        """Return the deadlines of its waits."""
        return Deadlines(self.job, self.view, self.spec)

    @cached_property
    def lost(self) -> LostWorkers:
        """Return the workers that its plan has lost."""
        return LostWorkers(self)

    @cached_property
    def shortages(self) -> tuple[DeviceShortage, ...]:
        """Return what plans respect because memory ran out, before or now."""
        return shortages_now(self.job, self.view, (self.current, self.next))

    @cached_property
    def plans(self) -> PlanLookup:
        """Return the plans that it could have."""
        return PlanLookup(self)

    @cached_property
    def origin(self) -> Origin:
        """Return where a plan begins that loads its state."""
        is_forgetful = self.known_generation > self.job.phase.generation
        return find_origin(self.job, self.view.nodes, generation=self.generation, is_forgetful=is_forgetful)

    @cached_property
    def furthest(self) -> int:
        """Return the first batch that has not begun, as far as is known."""
        job = self.job
        begun = [job.phase.furthest]
        begun += [job.plan.furthest] if job.plan is not None else []
        begun += [job.progress.batch + 1] if job.progress is not None else []
        return max([*begun, *(loss.failure.batch + 1 for loss in self.lost.found if loss.failure is not None)])

    @cached_property
    def generation(self) -> int:
        """Return the next generation: above every one that any node has seen for a job of this name."""
        seen = [self.job.phase.generation, self.known_generation, self.view.retired_generation(self.job.name)]
        seen += [plan.generation for plan in (self.job.plan, self.job.next) if plan is not None]
        return max([*seen, self.view.known_generation_of_name(self.job.name)]) + 1

    @cached_property
    def known_generation(self) -> int:
        """Return the highest generation that a node has seen of this submission."""
        return self.view.known_generation(self.job.name, self.job.uid)

    @property
    def recovery_allowed_at(self) -> float:
        """Return when recovery may begin: at once, unless a node that registers again may save many batches.

        Such a node can exist after nodes went or came, or after etcd was away and every lease ended.
        """
        num_lost, every = self.furthest - self.origin.boundary, self.spec.fault.snapshot_every
        if self.origin.source == "nodes" or not every or num_lost <= PATIENCE_SNAPSHOTS * every:
            return 0.0
        is_in_it = self.job.phase.phase is Phase.RECOVERING
        if not is_in_it:
            return self.now + LEASE_TTL_S
        began = self.deadlines.seen(self.job.entered_at)
        return min(max(began, self.view.nodes_changed_at) + LEASE_TTL_S, began + LONGEST_PATIENCE_S)

    @cached_property
    def moving(self) -> tuple[str, ...]:
        """Return the layers that some worker of `next` does not hold live, and the journal, which every stop saves."""
        plan, successor = self.job.plan, self.job.next
        assert plan is not None
        assert successor is not None
        return (*(layer for layer in self.spec.layers if is_moving(plan, successor, layer)), JOURNAL)
