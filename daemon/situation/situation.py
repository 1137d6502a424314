"""One job as the coordinator sees it at one moment: the facts that conditions and actions share. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from headway.daemon.costs.blocked_ways import BlockedWays
from headway.daemon.costs.profiles import Profiles
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.pipeline_shape import worker_name
from headway.daemon.planning.plan_devices import is_moving
from headway.daemon.planning.planner import ClusterPlan, PlanRefused
from headway.daemon.planning.rebalance import Outlook, Verdict, judge
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import (
    DeviceKey,
    FailureCount,
    NodeFailureRecord,
    NodeRecord,
    Phase,
    PlanRecord,
    StagePlan,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.situation.boundaries import fewest_holders
from headway.daemon.situation.deadlines import LEASE_TTL_S, Deadlines
from headway.daemon.situation.failure_budget import Death, broken_rule, counted
from headway.daemon.situation.late_workers import late_workers
from headway.daemon.situation.loss import Loss
from headway.daemon.situation.origin import Origin, find_origin
from headway.daemon.situation.outlook import as_fast_as_their_like, measured, on_probation, outlook
from headway.daemon.situation.plan_cache import Inquiry, Plans, PlansAtOnce, Purpose
from headway.daemon.situation.standing import Standing
from headway.daemon.storage.state_key import JOURNAL
from headway.daemon.view.cluster_view import ClusterView, JobView
from headway.daemon.view.quarantine import QUARANTINE_AFTER, charged_by, left_out
from headway.daemon.view.settling import SETTLE_S

PATIENCE_SNAPSHOTS: Final = 2
"""Falling back by more snapshots than this is worth a wait of LEASE_TTL_S for nodes that register their files again."""
LONGEST_PATIENCE_S: Final = 6 * LEASE_TTL_S
"""For that wait as a whole: a node that comes and goes for ever must not hold a job up."""
TELL_AFTER_S: Final = 1.0
"""Who waits longer for a plan to be computed says so."""
CAUSE_GRACE_S: Final = 1.5
"""After a worker complained of a neighbour: so long the neighbour's own error may take to be known."""
CHANGE_RETRY_S: Final = 10.0
"""After a change that was given up, before the next is tried."""


def is_leaving(node: NodeRecord) -> bool:
    """Whether new plans leave a node out by its own wish."""
    return node.is_draining or bool(node.stays_out)


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
    standing: Standing = field(default_factory=Standing)
    quarantine_after: int = QUARANTINE_AFTER
    """Failures of a node within the quarantine's time, after which it is left out; 0: never."""
    plans: Plans = field(default_factory=PlansAtOnce)
    """What needs one that is not there raises PlanMissingError."""

    @cached_property
    def spec(self) -> JobSpec:
        """What was submitted. Only jobs that have one are decided about."""
        spec = self.job.spec
        assert spec is not None
        return spec

    @cached_property
    def history(self) -> tuple[str, ...]:
        """Arithmetic classes that the weights have seen."""
        job = self.job
        if job.plan is not None:
            return job.plan.arithmetic_classes
        if job.phase.lineage is not None:
            return job.phase.arithmetic_classes
        return job.checkpoint.arithmetic_classes if job.checkpoint is not None else ()

    @cached_property
    def was_rounded(self) -> bool:
        """Whether the weights have seen a lossy wire."""
        job = self.job
        if job.plan is not None:
            return job.plan.was_rounded
        if job.phase.lineage is not None:
            return job.phase.was_rounded
        return job.checkpoint is not None and job.checkpoint.was_rounded

    @cached_property
    def why_quarantined(self) -> str:
        """Who charges the nodes that the job's plans leave out; empty: none is left out."""
        found = {name: self.view.failures.get(name, {}).values() for name in sorted(self.quarantined & set(self.nodes))}
        return "; ".join(f"{name} has {charged_by(failures)}" for name, failures in found.items() if failures)

    @cached_property
    def quarantined(self) -> frozenset[str]:
        """Nodes that failed too often of late, the present failure counted."""
        charged = {name: [*found.values()] for name, found in self.view.failures.items()}
        for name, charge in self.charges(self.losses).items():
            charged.setdefault(name, []).append(charge)
        left = left_out(charged, limit=self.quarantine_after, for_job=self.job.name)
        if len(self.view.nodes.keys() - left) >= max(self.spec.placement.min_nodes, 1):
            return left
        return left_out(charged, limit=self.quarantine_after)  # its errors are everywhere: its own budget ends that

    def charges(self, losses: Iterable[Loss]) -> dict[str, NodeFailureRecord]:
        """What losses charge nodes with: each node with one failure, and with the loss of one daemon only once."""
        found: dict[str, NodeFailureRecord] = {}
        for loss in losses:
            charge, name = loss.charge(self.job.name, at=self.written_at), loss.stage.node
            known = {record.incarnation for record in self.view.failures.get(name, {}).values()} - {""}
            if loss.is_held_against_node and charge.incarnation not in known:
                found.setdefault(name, charge)
        return found

    @cached_property
    def origin(self) -> Origin:
        """Where a plan that starts anew begins."""
        is_forgetful = self.known_generation > self.job.phase.generation
        return find_origin(self.job, self.view.nodes, generation=self.generation, is_forgetful=is_forgetful)

    @cached_property
    def furthest(self) -> int:
        """Batches below were begun, as far as is known."""
        job = self.job
        begun = [job.phase.furthest]
        begun += [job.plan.furthest] if job.plan is not None else []
        begun += [job.progress.batch + 1] if job.progress is not None else []
        return max([*begun, *(loss.worker.batch + 1 for loss in self.losses if loss.worker is not None)])

    @cached_property
    def best_plan(self) -> ClusterPlan | PlanRefused:
        """The best plan on the devices that no other job has, without nodes that keep going if that is possible."""
        flapping, unsettled = self.on_probation, self.unsettled
        nodes = {name: node for name, node in self.nodes.items() if name not in unsettled}
        steady = self._plan_on(Purpose.BEST, (node for name, node in nodes.items() if name not in flapping))
        if flapping and isinstance(steady, PlanRefused):
            return self._plan_on(Purpose.WITH_FLAPPING_NODES, nodes.values())
        return steady

    @cached_property
    def nodes(self) -> dict[str, NodeRecord]:
        """All that are there, by name, as plans see them."""
        return as_fast_as_their_like(self.view.nodes.values())

    @cached_property
    def on_probation(self) -> dict[str, float]:
        """Nodes that a running job does not move to yet, and until when. Without quarantine there is no probation."""
        return on_probation(self.job.plan, self.view, now=self.now) if self.quarantine_after else {}

    @cached_property
    def unsettled(self) -> frozenset[str]:
        """Nodes that are left out as they have just changed, and some node has for long."""
        if self.now < self.view.unrest.settled_at:
            return frozenset()  # nothing starts or changes before that
        own = {stage.node for stage in self.job.plan.stages} if self.job.plan is not None else set()
        return self.view.unrest.unsettled(self.view.nodes, now=self.now) - own

    @cached_property
    def profiles(self) -> Profiles:
        """What was measured."""
        return measured(self.job, self.view)

    @cached_property
    def outlook(self) -> Outlook | None:
        """What the best plan would change; None while there is nothing to compare."""
        best = self.best_plan
        if not isinstance(best, ClusterPlan):
            return None
        newcomers = self.view.newcomers(self.job)
        return outlook(self.job, self.nodes.values(), best, self.profiles, now=self.now, newcomers=newcomers)

    @cached_property
    def verdict(self) -> Verdict | None:
        """Whether the best plan is worth a change."""
        return judge(self.outlook) if self.outlook is not None else None

    @cached_property
    def recovery_plan(self) -> ClusterPlan | PlanRefused:
        """The best plan after a failure: if it can be, without the workers that did not answer and draining nodes.

        Where only draining nodes are left, the job goes back on them, so that it can be saved from there.
        """
        nodes = self.nodes.values()
        is_again = self.job.phase.phase is Phase.RECOVERING
        suspects = [loss.stage for loss in self.losses if loss.is_late or (is_again and loss.death.fault)]
        without = frozenset((stage.node, stage.device_index) for stage in suspects)
        plan = self._plan_on(Purpose.RECOVERY, nodes, without=without)
        if isinstance(plan, PlanRefused) and without:
            plan = self._plan_on(Purpose.RECOVERY_WITH_SUSPECTS, nodes)
        if isinstance(plan, PlanRefused):
            every = (replace(node, is_draining=False) for node in nodes)
            staying = self._plan_on(Purpose.RECOVERY_WITH_DRAINING_NODES, every)
            plan = staying if isinstance(staying, ClusterPlan) else plan
        return plan

    @cached_property
    def plan_on_everything(self) -> ClusterPlan | PlanRefused:
        """The best plan if every device were free: whether the job could run at all just now."""
        return self._plan_on(Purpose.ON_EVERYTHING, self.nodes.values())

    @cached_property
    def inquiry(self) -> Inquiry:
        """The plans that were asked for."""
        return Inquiry(self.plans, self.job.name)

    def _plan_on(
        self, purpose: Purpose, nodes: Iterable[NodeRecord], *, without: frozenset[DeviceKey] = frozenset()
    ) -> ClusterPlan | PlanRefused:
        """Raises PlanMissingError."""
        is_free = purpose is Purpose.ON_EVERYTHING
        is_under_way = self.job.plan is not None and self.job.phase.phase is not Phase.RECOVERING
        return self.inquiry.plan(
            purpose,
            self.spec,
            tuple(nodes),
            previous=None if is_free else self.job.plan,
            busy=frozenset() if is_free else self.busy | without,
            history=self.history,
            was_rounded=self.was_rounded,
            quarantined=self.quarantined,
            held=None if is_free or is_under_way else self._held,
            profiles=self.profiles,
            blocked=self.blocked,
        )

    @cached_property
    def blocked(self) -> BlockedWays:
        """The ways on which one node does not reach another."""
        return self.view.blocked

    @cached_property
    def _held(self) -> dict[str, tuple[str, ...]]:
        """Node to the layers that it holds of where a start would begin."""
        if self.origin.source != "nodes":
            return {}
        records = self.job.state.get((self.origin.source_timeline, self.origin.boundary), {})
        return {name: tuple(record.files) for name, record in records.items()}

    @cached_property
    def generation(self) -> int:
        """The next number: above every one that anybody has seen of this job, and of those that had its name before."""
        seen = [self.job.phase.generation, self.known_generation]
        seen += [plan.generation for plan in (self.job.plan, self.job.next) if plan is not None]
        return max([*seen, *(node.generations.get(self.job.name, 0) for node in self.view.nodes.values())]) + 1

    @cached_property
    def known_generation(self) -> int:
        """The highest that a node says it has seen of this submission."""
        nodes = self.view.nodes.values()
        return max((node.generation_seen(self.job.name, self.job.uid) for node in nodes), default=0)

    @cached_property
    def deadlines(self) -> Deadlines:
        """When what it waits for is late."""
        return Deadlines(self.job, self.view, self.spec)

    @property
    def recovery_allowed_at(self) -> float:
        """At once, unless much would be lost that a node might still hold which is about to register again.

        That may be so whenever nodes went or came, or etcd was away: then every lease has ended.
        """
        num_lost, every = self.furthest - self.origin.boundary, self.spec.fault.snapshot_every
        if self.origin.source == "nodes" or not every or num_lost <= PATIENCE_SNAPSHOTS * every:
            return 0.0
        is_in_it = self.job.phase.phase is Phase.RECOVERING
        if not is_in_it:
            return self.now + LEASE_TTL_S
        began = self.deadlines.seen(self.job.entered_at)
        return min(max(began, self.view.nodes_changed_at) + LEASE_TTL_S, began + LONGEST_PATIENCE_S)

    @property
    def settled_at(self) -> float:
        """When the set of nodes has been still for long enough, or moves for ever."""
        return self.view.unrest.settled_at

    @property
    def change_allowed_at(self) -> float:
        """Not right after the last change, and later if that was given up (its generation is spent, not in force)."""
        plan = self.job.plan
        was_given_up = plan is not None and self.job.phase.generation > plan.generation
        return self.job.entered_at + (CHANGE_RETRY_S if was_given_up else SETTLE_S)

    @property
    def reconsidered_at(self) -> float:
        """When the verdict on a better plan may be another by time alone; in the past: never."""
        waits = [*self.on_probation.values(), *map(self.view.unrest.steady_at, self.unsettled)]
        if self.verdict is not None and self.verdict.wait_s > 0:
            waits.append(self.now + self.verdict.wait_s)
        return min(waits, default=0.0)

    def lost_at(self, stage: StagePlan) -> float | None:
        """When a stage's node counts as lost, or None.

        At once if it was replaced, or if it went while etcd was there all the time. Otherwise its absence may be no
        more than that of its lease: it has one lease time to register again.
        """
        node = self.view.nodes.get(stage.node)
        if node is None:
            steady_since = self.view.steady_since
            since = self.view.absent_since.get(stage.node, self.view.started_at or 0.0)
            if Keys.node(stage.node) in self.view.unreadable:
                since += LEASE_TTL_S  # a daemon that lives writes its record again
            return max(since, steady_since + LEASE_TTL_S) if steady_since is not None else None
        return self.now if node.incarnation != stage.node_incarnation else None

    def is_lost(self, stage: StagePlan) -> bool:
        """Whether a stage's node counts as lost."""
        lost_at = self.lost_at(stage)
        return lost_at is not None and lost_at <= self.now

    def lost(self, plan: PlanRecord | None) -> StagePlan | None:
        """A worker's part whose node counts as lost."""
        return next((stage for stage in (plan.stages if plan is not None else ()) if self.is_lost(stage)), None)

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """What the plan that the present phase is about has lost: `next` while one is prepared, else `plan`."""
        is_next = self.job.phase.phase in (Phase.PREPARING, Phase.RECOVERING)
        plan = self.job.next if is_next else self.job.plan
        if plan is None:
            return ()
        workers, late = self._workers(plan), self.late_workers
        found = []
        for position, stage in enumerate(plan.stages):
            worker = workers.get(position)
            if worker is not None and worker.state is WorkerState.FAILED:
                found.append(Loss(position=position, plan=plan, worker=worker))
            elif self.is_lost(stage):
                found.append(Loss(position=position, plan=plan))
            elif position in late:
                node = self.view.nodes.get(stage.node)
                trouble = node.storage_trouble(self.job.name) if node is not None else ""
                found.append(Loss(position=position, plan=plan, is_late=True, storage_trouble=trouble))
        is_explained = any(loss.explains_others or loss.is_between(self.blocked) for loss in found)
        return tuple(found) if is_next or is_explained or self.now >= self.cause_known_at else ()

    @property
    def cause_known_at(self) -> float:
        """When what made a worker of the plan in force fail is known, if ever it will be; 0: none failed.

        A worker that lost a neighbour often tells before the neighbour's daemon does.
        """
        plan = self.job.plan
        failed_at = self.job.failed_at.get(plan.generation) if plan is not None else None
        return failed_at + CAUSE_GRACE_S if failed_at is not None else 0.0

    @property
    def causes(self) -> tuple[Loss, ...]:
        """The losses that explain the others; or, if none does, the first that complains."""
        return tuple(loss for loss in self.losses if loss.explains_others) or self.losses[:1]

    @property
    def first_error(self) -> str:
        """What a worker that is a cause said, or else any worker; empty: none said anything."""
        told = [loss.worker.error for loss in (*self.causes, *self.losses) if loss.worker is not None]
        return next((error for error in told if error), "")

    @cached_property
    def deaths(self) -> tuple[Death, ...]:
        """What counts for the failure budget: who is to blame; or, if that is nobody, one of those that complain.

        Where a pair of nodes is to blame, nobody is: the next plan avoids the pair. Nor where a worker was moved, nor
        where storage is away.
        """
        to_blame = [loss.death for loss in self.losses if loss.is_death]
        is_nobodys = any(loss.is_between(self.blocked) or loss.is_nobodys for loss in self.losses)
        if not to_blame and not is_nobodys and all(loss.worker is not None for loss in self.losses):
            to_blame = [loss.death for loss in self.losses[:1]]
        return tuple(to_blame)

    @cached_property
    def failures(self) -> FailureCount:
        """The failure budget's count with the present losses."""
        if not self.losses:
            return self.job.phase.failures
        return counted(self.job.phase.failures, self.deaths, boundary=self.origin.boundary, plan=self.job.plan)

    @cached_property
    def broken_rule(self) -> str:
        """Which rule of the failure budget the present losses break; empty: none."""
        return broken_rule(self.failures, self.deaths) if self.deaths else ""

    @cached_property
    def late_workers(self) -> tuple[int, ...]:
        """The positions of workers that the present phase has waited for in vain."""
        return late_workers(self)

    def can_load(self, plan: PlanRecord | None) -> bool:
        """Whether living nodes hold all that the workers of a plan which goes back to a boundary may have to load.

        Where records of it are missing, their nodes have had the time to write them again.
        """
        if plan is None or plan.source != "nodes" or plan.source_timeline == plan.timeline:
            return True
        if not self.unready_workers(plan, WorkerState.RUNNING, WorkerState.STOPPED):
            return True
        if fewest_holders(self.job, (plan.source_timeline, plan.boundary), self.view.nodes) > 0:
            return True
        return self.now < self.deadlines.heard

    def unusable(self, plan: PlanRecord | None) -> StagePlan | None:
        """A worker's part whose node is absent, replaced, draining or staying out of new plans just now."""
        for stage in plan.stages if plan is not None else ():
            node = self.view.nodes.get(stage.node)
            if node is None or node.incarnation != stage.node_incarnation or is_leaving(node):
                return stage
        return None

    def without_worker(self, plan: PlanRecord | None) -> StagePlan | None:
        """A worker's part whose device has no worker, as none starts there, and which has said nothing of the plan.

        One that died is missing too, until its record of that comes: that says whether anybody is to blame.
        """
        for position, stage in enumerate(plan.stages if plan is not None else ()):
            node = self.view.nodes.get(stage.node)
            is_down = node is not None and bool(node.worker_trouble) and stage.device_index in node.down_devices
            if is_down and position not in self._workers(plan):
                return stage
        return None

    def staying_out(self, plan: PlanRecord | None) -> StagePlan | None:
        """A worker's part whose node asks to be left out of new plans."""
        nodes = self.view.nodes
        stages = plan.stages if plan is not None else ()
        return next((stage for stage in stages if stage.node in nodes and nodes[stage.node].stays_out), None)

    def draining(self, plan: PlanRecord | None) -> tuple[str, ...]:
        """Nodes of a plan that drain."""
        names = {stage.node for stage in plan.stages} if plan is not None else set()
        return tuple(sorted(name for name in names if name in self.view.nodes and self.view.nodes[name].is_draining))

    def failed_worker(self, plan: PlanRecord | None) -> tuple[int, WorkerRecord] | None:
        """(position, record) of a worker that failed in a plan's generation."""
        for position, worker in self._workers(plan).items():
            if worker.state is WorkerState.FAILED:
                return position, worker
        return None

    def unready_workers(self, plan: PlanRecord, *states: WorkerState) -> tuple[int, ...]:
        """The positions of the workers that are in none of the states."""
        workers = self._workers(plan)
        return tuple(
            position
            for position in range(len(plan.stages))
            if position not in workers or workers[position].state not in states
        )

    def unready(self, plan: PlanRecord | None, *states: WorkerState) -> tuple[str, ...]:
        """`stage 1 on b` for every worker that is in none of the states."""
        if plan is None:
            return ()
        return tuple(worker_name(plan.stages, position) for position in self.unready_workers(plan, *states))

    def stopped_at(self, plan: PlanRecord | None, boundary: int | None) -> bool:
        """Whether every worker of a plan has stopped at a boundary."""
        if plan is None or boundary is None:
            return False
        workers = self._workers(plan)
        return len(workers) == len(plan.stages) and all(
            worker.state is WorkerState.STOPPED and worker.boundary == boundary for worker in workers.values()
        )

    def moving(self) -> tuple[str, ...]:
        """Layers that some worker of `next` has not live, and the journal, which is saved at every stop."""
        plan, successor = self.job.plan, self.job.next
        assert plan is not None
        assert successor is not None
        return (*(layer for layer in self.spec.layers if is_moving(plan, successor, layer)), JOURNAL)

    def _workers(self, plan: PlanRecord | None) -> dict[int, WorkerRecord]:
        return self.job.workers_of(plan) if plan is not None else {}
