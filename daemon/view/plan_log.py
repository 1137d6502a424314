"""Records the cluster's changes in a run's history: every plan in force, every phase of every job."""

import structlog

from headway.daemon.records.format import to_builtins
from headway.daemon.records.records import Phase, PlanRecord
from headway.daemon.view.cluster_view import ClusterView
from headway.daemon.view.cluster_watch import ClusterWatch

log = structlog.get_logger()


class PlanLog:
    """Reports each plan and each phase once, when a view first shows it."""

    def __init__(self) -> None:
        self._plans: dict[str, PlanRecord] = {}
        self._phases: dict[str, tuple[Phase, int]] = {}

    def note(self, view: ClusterView) -> None:
        """Look at a view after every change of it."""
        for job in view.jobs.values():
            if job.plan is not None and self._plans.get(job.name) != job.plan:
                self._plans[job.name] = job.plan
                log.info(
                    "plan_seen",
                    job=job.name,
                    generation=job.plan.generation,
                    timeline=job.plan.timeline,
                    plan=to_builtins(job.plan),
                )
            phase = (job.phase.phase, job.phase.generation)
            if self._phases.get(job.name) != phase:
                self._phases[job.name] = phase
                log.info(
                    "phase_seen",
                    job=job.name,
                    generation=job.phase.generation,
                    phase=job.phase.phase.value,
                    reason=job.phase.reason,
                    boundary=job.checkpoint.boundary if job.checkpoint is not None else None,
                )
        for name in self._phases.keys() - view.jobs.keys():
            del self._phases[name]
            self._plans.pop(name, None)


async def log_plans(cluster: ClusterWatch) -> None:
    """Look at the cluster after every change of it, until cancelled."""
    plan_log, seen = PlanLog(), -1
    while True:
        seen = await cluster.changed(seen)
        plan_log.note(cluster.view)
