"""One job as the coordinator sees it at one moment: the facts that conditions and actions share. Pure."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from headway.daemon.coordination.cluster_view import ClusterView, JobView
from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.layer_costs import layer_costs
from headway.daemon.planning.planner import ClusterPlan, PlanRefused, make_plan
from headway.daemon.records import PlanRecord, StagePlan, WorkerRecord, WorkerState

JOURNAL: Final = "journal"

SETTLE_S: Final = 2.0
"""Nodes often come in groups: how long the set of nodes must be still before a job starts or grows."""
ABSENCE_GRACE_S: Final = 3.0
"""How long a node of a running plan may be gone from etcd: after an outage it registers again."""
PREPARE_DEADLINE_S: Final = 120.0
"""For every worker of `next` to import the model, open its data and say so."""
START_DEADLINE_S: Final = 120.0
"""For every worker of a plan that came into force to load its layers and run, beside the time that loading takes."""
STOP_DEADLINE_S: Final = 60.0
"""For every worker to reach the stop boundary and write, beside the batches and the bytes that this takes."""
STOP_BATCHES: Final = 4
"""Batches' worth of time that a stop may take: the rest of one, the next, and as much again for a slow machine."""
TRANSFER_BYTES_PER_S: Final = 20e6
"""What deadlines expect at least of disks and links."""
CHANGE_RETRY_S: Final = 10.0
"""After a change that was given up, before the next is tried."""
WORTH_A_CHANGE: Final = 1.05
"""A plan must be predicted to be at least this many times faster before a running job is changed for it."""

DeviceKey = tuple[str, int]
"""(node, device)"""


def devices(plan: PlanRecord | ClusterPlan | None) -> frozenset[DeviceKey]:
    """The devices that a plan uses."""
    return frozenset((stage.node, stage.device_index) for stage in plan.stages) if plan is not None else frozenset()


def place(stage: StagePlan) -> tuple[str, str, int]:
    """Which worker: (node, incarnation, device)."""
    return stage.node, stage.node_incarnation, stage.device_index


@dataclass(kw_only=True)
class Case:
    """A job, the cluster, and the time; what is derived is computed once, when first asked for."""

    job: JobView
    view: ClusterView
    now: float
    written_at: float
    """Seconds since the epoch, for people to read."""
    busy: frozenset[DeviceKey] = field(default=frozenset())
    """Devices that other jobs have."""
    blocker: str = ""
    """An earlier job that is still waiting for devices, if there is one."""

    @cached_property
    def spec(self) -> JobSpec:
        """What was submitted. Only jobs that have one are decided about."""
        spec = self.job.spec
        assert spec is not None
        return spec

    @cached_property
    def history(self) -> tuple[str, ...]:
        """Arithmetic classes that the weights have seen."""
        if self.job.plan is not None:
            return self.job.plan.arithmetic_classes
        return self.job.checkpoint.arithmetic_classes if self.job.checkpoint is not None else ()

    @cached_property
    def best_plan(self) -> ClusterPlan | PlanRefused:
        """The best plan on the devices that no other job has."""
        return make_plan(
            self.spec, self.view.nodes.values(), previous=self.job.plan, busy=self.busy, history=self.history
        )

    @cached_property
    def plan_on_everything(self) -> ClusterPlan | PlanRefused:
        """The best plan if every device were free: whether the job could run at all just now."""
        return make_plan(self.spec, self.view.nodes.values(), history=self.history)

    @cached_property
    def generation(self) -> int:
        """The next number: above every one that anybody has seen of this job."""
        seen = [self.job.phase.generation]
        seen += [plan.generation for plan in (self.job.plan, self.job.next) if plan is not None]
        seen += [node.generations.get(self.job.name, 0) for node in self.view.nodes.values()]
        return max(seen) + 1

    @cached_property
    def batch_seconds(self) -> float:
        """The longer of what was predicted and what is measured."""
        predicted = self.job.plan.predicted_batch_seconds if self.job.plan is not None else 0.0
        progress = self.job.progress
        if progress is None or progress.tokens_per_second <= 0:
            return predicted
        return max(predicted, self.spec.train.tokens_per_batch / progress.tokens_per_second)

    @cached_property
    def transfer_seconds(self) -> float:
        """To write or fetch the whole state, at the least that is expected of disks and links."""
        return sum(cost.state_bytes for cost in layer_costs(self.spec)) / TRANSFER_BYTES_PER_S

    @property
    def stop_deadline(self) -> float:
        """When the present step of a stop is late."""
        return self.job.stop_changed_at + STOP_DEADLINE_S + STOP_BATCHES * self.batch_seconds + self.transfer_seconds

    @property
    def prepare_deadline(self) -> float:
        """When the workers of `next` are late."""
        return self.job.entered_at + PREPARE_DEADLINE_S

    @property
    def start_deadline(self) -> float:
        """When the workers of a new plan in force are late."""
        return self.job.entered_at + START_DEADLINE_S + self.transfer_seconds

    @property
    def end_deadline(self) -> float:
        """When the last workers are late at the end of the job, after the first have reached it."""
        return self.job.workers_changed_at + STOP_DEADLINE_S + STOP_BATCHES * self.batch_seconds

    @property
    def settled_at(self) -> float:
        """When the set of nodes has been still for long enough."""
        return self.view.nodes_changed_at + SETTLE_S

    @property
    def change_allowed_at(self) -> float:
        """Not right after the last change, and later if that was given up (its generation is spent, not in force)."""
        plan = self.job.plan
        was_given_up = plan is not None and self.job.phase.generation > plan.generation
        return self.job.entered_at + (CHANGE_RETRY_S if was_given_up else SETTLE_S)

    def lost_at(self, stage: StagePlan) -> float | None:
        """When a stage's node counts as lost: at once if it was replaced, after a grace if it is absent; or None."""
        node = self.view.nodes.get(stage.node)
        if node is None:
            since = self.view.absent_since.get(stage.node, self.view.started_at or 0.0)
            return since + ABSENCE_GRACE_S
        return self.now if node.incarnation != stage.node_incarnation else None

    def lost(self, plan: PlanRecord | None) -> StagePlan | None:
        """A stage whose node counts as lost."""
        for stage in plan.stages if plan is not None else ():
            lost_at = self.lost_at(stage)
            if lost_at is not None and lost_at <= self.now:
                return stage
        return None

    def unusable(self, plan: PlanRecord | None) -> StagePlan | None:
        """A stage whose node is absent, replaced or draining just now."""
        for stage in plan.stages if plan is not None else ():
            node = self.view.nodes.get(stage.node)
            if node is None or node.incarnation != stage.node_incarnation or node.is_draining:
                return stage
        return None

    def draining(self, plan: PlanRecord | None) -> tuple[str, ...]:
        """Nodes of a plan that drain."""
        names = {stage.node for stage in plan.stages} if plan is not None else set()
        return tuple(sorted(name for name in names if name in self.view.nodes and self.view.nodes[name].is_draining))

    def failed_worker(self, plan: PlanRecord | None) -> tuple[int, WorkerRecord] | None:
        """(stage, record) of a worker that failed in a plan's generation."""
        for stage_index, worker in self._workers(plan).items():
            if worker.state is WorkerState.FAILED:
                return stage_index, worker
        return None

    def unready(self, plan: PlanRecord | None, *states: WorkerState) -> tuple[str, ...]:
        """`stage 1 on b` for every stage whose worker is in none of the states."""
        workers = self._workers(plan)
        return tuple(
            f"stage {stage_index} on {stage.node}"
            for stage_index, stage in enumerate(plan.stages if plan is not None else ())
            if stage_index not in workers or workers[stage_index].state not in states
        )

    def stopped_at(self, plan: PlanRecord | None, boundary: int | None) -> bool:
        """Whether every worker of a plan has stopped at a boundary."""
        if plan is None or boundary is None:
            return False
        workers = self._workers(plan)
        return len(workers) == len(plan.stages) and all(
            worker.state is WorkerState.STOPPED and worker.boundary == boundary for worker in workers.values()
        )

    def moving(self) -> tuple[str, ...]:
        """Layers whose worker differs between `plan` and `next`, and the journal, which is saved at every stop."""
        plan, successor = self.job.plan, self.job.next
        assert plan is not None
        assert successor is not None
        moved = (layer for layer in self.spec.layers if place(plan.holder(layer)) != place(successor.holder(layer)))
        return (*moved, JOURNAL)

    def _workers(self, plan: PlanRecord | None) -> dict[int, WorkerRecord]:
        return self.job.workers_of(plan) if plan is not None else {}
