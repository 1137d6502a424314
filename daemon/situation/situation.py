"""One job as the coordinator sees it at one moment: the facts that conditions and actions share. Pure.

plan_lookup.py has its plans, deadlines.py its waits, plan_health.py the state of a plan, lost_workers.py its losses.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from headway.daemon.jobs.job import JobSpec
from headway.daemon.planning.cluster_plan import is_moving
from headway.daemon.records.records import DeviceKey, Phase, PlanRecord, WorkerState
from headway.daemon.records.shortages import DeviceShortage
from headway.daemon.situation.deadlines import LEASE_TTL_S, Deadlines
from headway.daemon.situation.lost_workers import LostWorkers
from headway.daemon.situation.memory import shortages_now
from headway.daemon.situation.origin import Origin, find_origin
from headway.daemon.situation.plan_cache import Plans, PlansAtOnce
from headway.daemon.situation.plan_health import PlanHealth
from headway.daemon.situation.plan_lookup import PlanLookup
from headway.daemon.situation.standing import Standing
from headway.daemon.storage.state_key import JOURNAL
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.job_view import JobView
from headway.daemon.view.quarantine import QUARANTINE_AFTER

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
    standing: Standing = field(default_factory=Standing)
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
        return max([*begun, *(loss.worker.batch + 1 for loss in self.lost.found if loss.worker is not None)])

    @cached_property
    def generation(self) -> int:
        """Return the next generation: above every one that any node has seen for a job of this name."""
        seen = [self.job.phase.generation, self.known_generation, self.view.retired_generation(self.job.name)]
        seen += [plan.generation for plan in (self.job.plan, self.job.next) if plan is not None]
        return max([*seen, self.view.generations.of_name(self.job.name)]) + 1

    @cached_property
    def known_generation(self) -> int:
        """Return the highest generation that a node has seen of this submission."""
        return self.view.generations.of_submission(self.job.name, self.job.uid)

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
